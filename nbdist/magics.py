"""``%%distributed`` and ``%distributed``: parse, call, display."""

from __future__ import annotations

import argparse
import ast
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class

from nbdist.errors import InputError, NbdistError, NotRunningError
from nbdist.notebook import cluster as clusters
from nbdist.notebook.cluster import Cluster
from nbdist.notebook.running import RunHandle

__all__ = ["DistributedMagics", "load", "parse_ranks", "unload"]

PROFILE_STEPS = 3


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line and which never ends the process."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}; `{self.prog.split()[0]} -h` shows what there is")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise _Helped


class _Helped(Exception):
    """The help was printed; nothing else is to be done."""


def _number(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"takes a number of ranks of at least 1, not {text!r}") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"takes a number of ranks of at least 1, not {text}")
    return value


def _steps(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"takes a number of optimizer steps of at least 1, not {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"takes a number of seconds, not {text!r}") from None
    if not value > 0:
        raise argparse.ArgumentTypeError(f"takes a number of seconds above 0, not {text}")
    return value


def parse_ranks(text: str) -> list[int]:
    """Read a list of ranks such as ``0,2-3``.

    Raises
    ------
    InputError
        If it is no such list.
    """
    ranks: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise InputError(f"-r takes ranks such as 0, 0,2 or 1-3, not {text!r}")
        ranks.update(range(int(first), int(last or first) + 1))
    return sorted(ranks)


def _start_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-n", type=_number, metavar="N", help="number of ranks (default: one per GPU; without a GPU, 2)"
    )
    parser.add_argument(
        "--backend", choices=["nccl", "gloo"], help="nccl needs a GPU for each rank; with gloo ranks may share GPUs"
    )
    parser.add_argument(
        "--check-collectives",
        action="store_true",
        help="mismatched collectives raise on every rank instead of hanging or aborting (slower; for teaching)",
    )
    parser.add_argument(
        "--nccl-debug", action="store_true", help="keep each rank's NCCL log, which `%%distributed doctor` then reads"
    )


def _cell_parser() -> _Parser:
    parser = _Parser(prog="%%distributed", description="Run the cell on every rank.")
    _start_options(parser)
    parser.add_argument("-r", "--ranks", metavar="RANKS", help="only on these ranks, e.g. 0,2-3")
    parser.add_argument("--background", action="store_true", help="return a handle at once; the notebook stays usable")
    parser.add_argument("--timeout", type=_seconds, metavar="S", help="interrupt the cell after S seconds")
    parser.add_argument(
        "--watch", metavar="NAMES", help="variables to record at each optimizer step, e.g. loss,acc ('' for none)"
    )
    parser.add_argument(
        "--setup",
        action="store_true",
        help="run it again after `%%distributed restart --replay`, e.g. imports, data, model",
    )
    parser.add_argument(
        "--no-dashboard", action="store_true", help="a line of text every few seconds instead of the live plot"
    )
    parser.add_argument("--name", metavar="NAME", help="name of this run")
    parser.add_argument(
        "--profile",
        nargs="?",
        const=PROFILE_STEPS,
        type=_steps,
        metavar="STEPS",
        help=f"record optimizer steps (default: {PROFILE_STEPS}) with torch.profiler: a table, and a file for Perfetto",
    )
    parser.add_argument("--profile-ranks", metavar="RANKS", help="ranks that record (default: the first), e.g. 0,2-3")
    parser.add_argument("handle", nargs="?", help="variable that takes the handle of a background run")
    return parser


def _line_parser() -> _Parser:
    parser = _Parser(prog="%distributed", description="Look after the workers.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)

    def command(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text)

    _start_options(command("start", "start workers"))
    command("status", "what runs, on what")
    command("stop", "end all workers; nothing of them stays")
    restart = command("restart", "fresh workers, in a fraction of a second")
    _start_options(restart)
    restart.add_argument("--replay", action="store_true", help="then run the cells marked with --setup again")
    command("interrupt", "stop the run in the background")
    command("where", "what every rank is doing").add_argument("--full", action="store_true", help="whole Python stacks")
    output = command("output", "the whole text of one rank")
    output.add_argument("rank", type=int)
    output.add_argument("-t", "--tail", type=int, metavar="LINES", help="only its last lines")
    for name, text in (
        ("push", "send variables of the notebook to the ranks"),
        ("pull", "fetch variables from the ranks"),
    ):
        sub = command(name, text)
        sub.add_argument("names", nargs="+", metavar="NAME")
        sub.add_argument("-r", "--ranks", metavar="RANKS", help="only these ranks, e.g. 0,2-3")
    history = command("history", "runs of this session, or the metrics of one")
    history.add_argument("run", nargs="?", help="its name or number; the last one by default")
    history.add_argument("--csv", metavar="FILE", help="write its points to a file")
    command("dashboard", "show a run again").add_argument(
        "run", nargs="?", help="its name or number; by default the last"
    )
    doctor = command("doctor", "is this machine fit for distributed training?")
    doctor.add_argument("--preflight", action="store_true", help="also try a collective and a loader in the ranks")
    doctor.add_argument("--bandwidth", action="store_true", help="also measure collectives over sizes in the ranks")
    doctor.add_argument("--report", action="store_true", help="what to paste in a bug report; no host or user names")
    return parser


@magics_class
class DistributedMagics(Magics):
    """The two magics and the cluster they speak to."""

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self._ipython: Any = shell
        self.cluster: Cluster | None = None
        self.setup_cells: list[str] = []
        self._cell_parser = _cell_parser()
        self._line_parser = _line_parser()

    # ---- the magics

    @cell_magic("distributed")  # type: ignore[arg-type]
    def run_cell(self, line: str, cell: str) -> RunHandle | None:
        """Run the cell on every rank; `%%distributed -h` shows the options."""
        try:
            options = self._parse(self._cell_parser, line)
            ranks = parse_ranks(options.ranks) if options.ranks is not None else None
            code = self._checked(cell)
            cluster = self._running(options)
            if options.setup:
                self._remember(code)
            handle = cluster.run(
                code,
                ranks=ranks,
                background=options.background,
                timeout_s=options.timeout,
                watch=_names(options.watch),
                dashboard=not options.no_dashboard,
                cell=self._cell_number(),
                name=options.name,
                autoreload=self._autoreload(),
                profile_steps=options.profile,
                profile_ranks=parse_ranks(options.profile_ranks) if options.profile_ranks is not None else None,
            )
        except _Helped:
            return None
        except (InputError, NotRunningError) as error:
            raise UsageError(str(error)) from None
        if not options.background:
            return None
        if options.handle:
            self._ipython.push({options.handle: handle})
            return None
        return handle

    @line_magic("distributed")  # type: ignore[arg-type]
    def command(self, line: str) -> Any:
        """Look after the workers: `%distributed -h` shows the commands."""
        try:
            options = self._parse(self._line_parser, line)
            if options.command is None:
                self._line_parser.print_help()
                return None
            action: Callable[[argparse.Namespace], Any] = getattr(self, f"_{options.command}")
            return action(options)
        except _Helped:
            return None
        except (InputError, NotRunningError) as error:
            raise UsageError(str(error)) from None

    @staticmethod
    def _parse(parser: _Parser, line: str) -> argparse.Namespace:
        try:
            words = shlex.split(line)
        except ValueError as error:
            raise UsageError(f"{parser.prog}: {error}") from None
        return parser.parse_args(words)

    # ---- cells

    def _remember(self, code: str) -> None:
        """Keep a set-up cell for `restart --replay`; running it again moves it to the end."""
        if code in self.setup_cells:
            self.setup_cells.remove(code)
        self.setup_cells.append(code)

    def _checked(self, cell: str) -> str:
        """The cell's text, once it is known to be Python: a syntax error is raised before any rank runs anything."""
        transformed = self._ipython.transform_cell(cell)
        name = self._ipython.compile.cache(transformed, self._cell_number(), raw_code=cell)
        try:
            compile(transformed, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        except SyntaxError as error:
            lines = self._ipython.SyntaxTB.structured_traceback(SyntaxError, error, None)
            error._render_traceback_ = lambda: lines  # type: ignore[attr-defined]
            raise error.with_traceback(None) from None
        return cell

    def _cell_number(self) -> int:
        """Number of the cell that is running. IPython 9 has counted on by now, IPython 8 has not: its frame knows."""
        numbers = self._ipython.compile._filename_map
        frame = sys._getframe()
        while frame is not None and frame.f_code.co_filename not in numbers:
            frame = frame.f_back  # type: ignore[assignment]
        return int(numbers[frame.f_code.co_filename] if frame is not None else self._ipython.execution_count)

    def _running(self, options: argparse.Namespace) -> Cluster:
        if self.cluster is None or not self.cluster.alive:
            self._start(options)
            return self.running()
        size = self.cluster.world_size
        if options.n is not None and options.n != size:
            raise InputError(
                f"{size} ranks are running, not {options.n}: `%distributed restart -n {options.n}` changes that"
            )
        if options.backend is not None and options.backend != self.cluster.choice.backend:
            raise InputError(
                f"the backend is {self.cluster.choice.backend}:"
                f" `%distributed restart --backend {options.backend}` changes that"
            )
        return self.cluster

    def _autoreload(self) -> str | None:
        reloader = getattr(self.shell, "_nbdist_autoreload", None)
        for function in self._ipython.events.callbacks.get("pre_run_cell", []):
            owner = getattr(function, "__self__", None)
            if type(owner).__name__ == "AutoreloadMagics":
                reloader = getattr(owner, "_reloader", None)
        if reloader is None or not reloader.enabled:
            return None
        return "2" if reloader.check_all else "1"

    # ---- commands

    def running(self) -> Cluster:
        """The running cluster, or `NotRunningError`."""
        if self.cluster is None or not self.cluster.alive:
            raise NotRunningError(
                "no cluster is running: start one with `%distributed start`, or run a `%%distributed` cell"
            )
        return self.cluster

    def _start(self, options: argparse.Namespace) -> None:
        if self.cluster is not None and self.cluster.alive:
            raise InputError(
                f"{self.cluster.world_size} ranks are running already: `%distributed restart` gives fresh ones"
            )
        self.cluster = clusters.start(
            options.n,
            backend=options.backend,
            check_collectives=options.check_collectives,
            nccl_debug=options.nccl_debug,
        )
        self.cluster.names = self._user_names

    def _user_names(self) -> list[str]:
        return [name for name in self._ipython.user_ns if name not in self._ipython.user_ns_hidden]

    def _status(self, _: argparse.Namespace) -> None:
        if self.cluster is None or not self.cluster.alive:
            print("no cluster is running")
            return
        print(f"{self.cluster.choice}")
        for line in self.cluster.where():
            print(line)

    def _stop(self, _: argparse.Namespace) -> None:
        self.running().stop()
        self.cluster = None

    def _restart(self, options: argparse.Namespace) -> None:
        cluster = self.running()
        same = options.n in (None, cluster.world_size) and options.backend in (None, cluster.choice.backend)
        if same and not options.check_collectives and not options.nccl_debug and cluster.can_restart():
            cluster.restart()
            print(f"{cluster.world_size} fresh ranks")
        else:
            options.n = options.n or (None if options.backend else cluster.world_size)
            cluster.stop()
            self.cluster = None
            self._start(options)
        if options.replay:
            if not self.setup_cells:
                raise InputError("no cell was marked: `%%distributed --setup` marks one to be run again")
            for code in self.setup_cells:
                self.running().run(code, cell=self._cell_number())

    def _interrupt(self, _: argparse.Namespace) -> None:
        self.running().interrupt()

    def _where(self, options: argparse.Namespace) -> None:
        for line in self.running().where(full=options.full):
            print(line)

    def _output(self, options: argparse.Namespace) -> None:
        text = self.running().output(options.rank)
        lines = text.splitlines()
        print("\n".join(lines[-options.tail :] if options.tail else lines))

    def _push(self, options: argparse.Namespace) -> None:
        cluster = self.running()
        if missing := [name for name in options.names if name not in self._ipython.user_ns]:
            raise InputError(f"the notebook has no variable {', '.join(missing)}")
        ranks = parse_ranks(options.ranks) if options.ranks is not None else None
        cluster.push({name: self._ipython.user_ns[name] for name in options.names}, ranks=ranks)

    def _pull(self, options: argparse.Namespace) -> None:
        cluster = self.running()
        ranks = parse_ranks(options.ranks) if options.ranks is not None else None
        for name in options.names:
            if not name.isidentifier():
                raise InputError(
                    f"%distributed pull takes names of variables, not {name!r}; cluster.pull() takes expressions"
                )
            found = cluster.pull(name, ranks=ranks)
            single = ranks is not None and len(ranks) == 1
            self._ipython.push({name: next(iter(found.values())) if single else found})

    def _run_named(self, name: str | None) -> Any:
        runs = self.running().runs
        if not runs:
            raise InputError("no run has reported metrics yet")
        if name is None:
            return runs[-1]
        for run in runs:
            if name in (run.name, run.name.removeprefix("run ")):
                return run
        raise InputError(f"there is no run {name!r}; there are {', '.join(r.name for r in runs)}")

    def _history(self, options: argparse.Namespace) -> Any:
        run = self._run_named(options.run)
        if options.csv:
            print(run.to_csv(options.csv))
            return None
        return run

    def _dashboard(self, options: argparse.Namespace) -> None:
        self.running().show(self._run_named(options.run))

    def _doctor(self, options: argparse.Namespace) -> Any:
        from nbdist.doctor.report import diagnose

        alive = self.cluster if self.cluster is not None and self.cluster.alive else None
        found: dict[str, Any] = {}
        if options.preflight or options.bandwidth:
            ranks = self.running()
            if options.preflight:
                ranks.run("import nbdist.doctor.preflight as _p; _found = _p.preflight(); del _p", dashboard=False)
                found["preflight"] = ranks.pull("_found", ranks=[0])[0]
            if options.bandwidth:
                ranks.run("import nbdist.doctor.bandwidth as _b; _found = _b.measure(); del _b", dashboard=False)
                found["bandwidth"] = ranks.pull("_found", ranks=[0])[0]
        if alive is not None and alive.nccl_logs() is not None:
            found["nccl_logs"] = [alive.nccl_logs()]
        diagnosis = diagnose(**found)
        if options.report:
            print(diagnosis.report())
            return None
        return diagnosis


def _names(text: str | None) -> Sequence[str] | None:
    if text is None:
        return None
    names = [name.strip() for name in text.split(",") if text.strip()]
    if not all(part.isidentifier() for name in names for part in name.split(".")):
        raise InputError(f"--watch takes names of variables such as loss,acc, not {text!r}")
    return names


def _fill_empty_cell(lines: list[str]) -> list[str]:
    """IPython refuses a cell magic without a body; an empty distributed cell is as good as one with a comment."""
    if lines and lines[0].startswith("%%distributed") and not any(line.strip() for line in lines[1:]):
        return [lines[0].rstrip("\n") + "\n", "\n"]
    return lines


def cluster() -> Cluster:
    """The cluster that the notebook's magics speak to: ``nbdist.cluster().pull("loss")``.

    Raises
    ------
    NotRunningError
        If none is running.
    """
    if _loaded is None:
        raise NotRunningError("no cluster is running: `%load_ext nbdist`, then run a `%%distributed` cell")
    return _loaded.running()


_loaded: DistributedMagics | None = None


def load(shell: InteractiveShell) -> None:
    """Register the magics and start warming the fork server; loading twice changes nothing."""
    global _loaded
    if _loaded is not None and _loaded.shell is shell:
        return
    if not sys.platform.startswith("linux"):
        print("nbdist runs on Linux (WSL2 and Docker included); this system is " + sys.platform)
        return
    _loaded = DistributedMagics(shell)
    shell.register_magics(_loaded)
    shell.input_transformers_cleanup.append(_fill_empty_cell)
    try:
        clusters.warm()
    except NbdistError as error:
        print(f"nbdist: {error}")


def unload(shell: InteractiveShell) -> None:
    """Stop the workers and take the magics away."""
    global _loaded
    if _loaded is None:
        return
    if _loaded.cluster is not None:
        _loaded.cluster.stop()
    clusters.cool()
    if _fill_empty_cell in shell.input_transformers_cleanup:
        shell.input_transformers_cleanup.remove(_fill_empty_cell)
    for kind in ("line", "cell"):
        shell.magics_manager.magics[kind].pop("distributed", None)
    _loaded = None
