"""The doctor: gathers the facts, runs the checks, and draws the outcome as text, HTML or JSON.

``nbdist doctor`` calls `main`, ``%distributed doctor`` calls `diagnose`.
"""

from __future__ import annotations

import argparse
import getpass
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

from nbdist import __version__
from nbdist.doctor import nccl_log, ranks
from nbdist.doctor.bandwidth import Bandwidth
from nbdist.doctor.checks import check, link_table
from nbdist.doctor.facts import Facts, gather, num_ranks, seen_by_cuda
from nbdist.doctor.finding import VERDICTS, Finding, Verdict, html_of, text_of, worst
from nbdist.errors import InputError

__all__ = ["Diagnosis", "diagnose", "main"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What the doctor found: of the checks and the pre-flight, and, where asked for, measurements and NCCL's logs."""

    facts: Facts
    findings: tuple[Finding, ...]
    bandwidth: Bandwidth | None = None
    nccl: nccl_log.NcclReport | None = None

    @property
    def verdict(self) -> Verdict:
        """The most serious verdict."""
        return worst([*self.findings, *(self.nccl.findings if self.nccl else ())])

    @property
    def exit_status(self) -> int:
        """1 if something failed, else 0: warnings do not stop a build."""
        return int(self.verdict == "fail")

    @property
    def headline(self) -> str:
        """One line: how many of what."""
        counts = Counter(f.verdict for f in self.findings)
        words: dict[Verdict, str] = {"fail": "to mend", "warn": "slow or fragile", "info": "to know"}
        said = [f"{counts[v]} {words[v]}" for v in VERDICTS if v in words and counts[v]]
        return f"nbdist doctor: {', '.join(said) or 'all is well'} ({counts['ok']} checks passed)"

    def __str__(self) -> str:
        blocks = [f"{self.headline}\n{text_of(self.findings)}", "\n".join(link_table(self.facts))]
        return "\n\n".join(filter(None, [*blocks, *map(str, self._measured())]))

    def _repr_html_(self) -> str:
        table = "\n".join(link_table(self.facts))
        parts = [f"<p><b>{escape(self.headline)}</b></p>{html_of(self.findings)}"]
        parts += [f"<pre>{escape(table)}</pre>" * bool(table), *(part._repr_html_() for part in self._measured())]
        return "".join(parts)

    def _measured(self) -> list[Bandwidth | nccl_log.NcclReport]:
        return [part for part in (self.bandwidth, self.nccl) if part is not None]

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON values; the facts can be read again by `Facts.from_json`."""
        return {
            "verdict": self.verdict,
            "findings": [asdict(f) for f in self.findings],
            "bandwidth": self.bandwidth.to_json() if self.bandwidth else None,
            "nccl": self.nccl.to_json() if self.nccl else None,
            "facts": self.facts.to_json(),
        }

    def report(self) -> str:
        """Text for a bug report, without the names of hosts and users and without addresses."""
        hosts = {m.host for c in self.nccl.log.communicators for m in c.members.values()} if self.nccl else set()
        secret = _Secrets(self.facts, hosts)
        versions = ", ".join(f"{n} {v}" for n, v in self.facts.packages.items())
        text = (
            f"nbdist {__version__} doctor report\n\n"
            f"{self.facts.system}; Python {self.facts.python}; {versions}\n\n{self}\n\n"
            "Facts (nbdist doctor --facts FILE judges them again):"
        )
        return f"{secret.hide(text)}\n\n```json\n{json.dumps(secret.facts(), indent=1)}\n```\n"


def diagnose(
    *,
    nodes: int = 1,
    ranks: int | None = None,
    facts: Facts | None = None,
    folder: str | Path | None = None,
    nccl_logs: Sequence[str | Path] = (),
    preflight: Sequence[Finding] = (),
    bandwidth: Bandwidth | None = None,
) -> Diagnosis:
    """Judge this machine.

    Parameters
    ----------
    nodes, ranks
        What is planned: machines; ranks on this one (None: one per GPU, else 2).
    facts
        Judge these instead of this machine.
    folder
        The notebook's folder, where a file may hide a module; None: the current one.
    nccl_logs
        Files or folders of NCCL's logs to be judged as well.
    preflight, bandwidth
        What ranks have found and measured, to be shown with the rest.
    """
    if nodes < 1 or (ranks is not None and ranks < 1):
        raise InputError("expected at least one node and one rank")
    if facts is None:
        facts = gather(nodes=nodes, ranks=ranks, folder=None if folder is None else Path(folder))
    return Diagnosis(
        facts=facts,
        findings=(*check(facts), *preflight),
        bandwidth=bandwidth,
        nccl=nccl_log.read(*nccl_logs) if nccl_logs else None,
    )


# Everyday words tell nobody's name, and cutting them out would spoil the text.
_EVERYDAY = {"root", "localhost", "docker", "jupyter", "nvidia", "torch", "ubuntu", "user", "gpu", "cpu"}
_TELLING = re.compile(r"(NCCL|GLOO|TORCH|PYTORCH|CUDA|NVIDIA|OMP|MKL)_|(LOCAL_)?(RANK|WORLD_SIZE)$|SLURM_(N|JOB_NUM)")
_HOMES = re.compile(r"/(?:home|Users|root)(?:/[^/\s\"':,;]+)?(?=[/\s\"':,;]|$)")
_IPV4 = re.compile(r"(?<![\d.])(?!127\.)\d{1,3}(?:\.\d{1,3}){3}(?![\d.])")
_IPV6 = re.compile(r"(?i)(?<![\w:-])(?:[0-9a-f]{1,4}:){2,7}(?:[0-9a-f]{1,4}|:[0-9a-f:]*)")


class _Secrets:
    """Takes names of hosts and users, home folders and addresses out of a text."""

    def __init__(self, facts: Facts, hosts: Iterable[str] = ()) -> None:
        self._facts = facts
        try:
            user = getpass.getuser()
        except (OSError, KeyError):  # a user id without a name
            user = ""
        own = facts.hostname or ""
        told = [facts.variables.get(n, "") for n in ("MASTER_ADDR", "SLURM_NODELIST", "SLURM_JOB_NODELIST")]
        names = {user: "<user>", **dict.fromkeys((own, own.split(".")[0], *told), "<host>")}
        names |= {host: f"<host {number}>" for number, host in enumerate(sorted(hosts), 1)}
        self._names = {name: to for name, to in names.items() if len(name) > 1 and name not in _EVERYDAY}

    def hide(self, text: str) -> str:
        text = _HOMES.sub("~", text)
        text = text.replace(str(Path.home()), "~") if str(Path.home()) != "/" else text
        for name, to in self._names.items():
            text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", to, text)
        return _IPV6.sub("<address>", _IPV4.sub("<address>", text))

    def facts(self) -> dict[str, Any]:
        """The facts, without those that are nothing but names."""
        value = self._facts.to_json()
        value.pop("hostname", None)
        value.pop("own_pids", None)
        value["variables"] = {k: v if _TELLING.match(k) else "<set>" for k, v in self._facts.variables.items()}
        if self._facts.addresses:
            value["addresses"] = {name: [] for name in self._facts.addresses}
        return {k: self._hidden(v) for k, v in value.items()}

    def _hidden(self, value: Any) -> Any:
        """Hide names in every text of a JSON value; its keys are fields' and variables' names."""
        if isinstance(value, str):
            return self.hide(value)
        if isinstance(value, dict):
            return {k: self._hidden(v) for k, v in value.items()}
        return [self._hidden(v) for v in value] if isinstance(value, list) else value


# ---- the command


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nbdist doctor",
        description="Is this machine, image and driver fit for distributed training, and how are its GPUs linked? "
        "Exits with 1 if something must be mended.",
    )
    shape, add = parser.add_mutually_exclusive_group(), parser.add_argument
    shape.add_argument("--json", action="store_true", help="findings and facts as JSON")
    shape.add_argument("--report", action="store_true", help="text for a bug report, host and user names left out")
    add("-n", "--ranks", type=int, metavar="N", help="ranks planned (default: one per GPU, else 2)")
    add("--nodes", type=int, default=1, metavar="N", help="machines planned (default: 1)")
    add("--preflight", action="store_true", help="try copies, an all-reduce and a DataLoader in ranks")
    add("--bandwidth", action="store_true", help="measure all-reduce, all-gather and reduce-scatter")
    add("--nccl-log", action="append", default=[], metavar="FILE", help="judge a log of NCCL_DEBUG=INFO, or a folder")
    add("--facts", type=Path, metavar="FILE", help="judge the facts of a --json or --report output")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``nbdist doctor`` with these words; returns the exit status (2: wrong arguments)."""
    args = _parser().parse_args(argv)
    found: Diagnosis | nccl_log.NcclReport
    try:
        if args.nccl_log and not (args.preflight or args.bandwidth or args.report or args.facts):
            found = nccl_log.read(*args.nccl_log)
        else:
            facts = _pasted(args.facts) if args.facts else None
            found = diagnose(nodes=args.nodes, ranks=args.ranks, facts=facts, nccl_logs=args.nccl_log)
            found = _try(found, preflight=args.preflight, bandwidth=args.bandwidth)
    except InputError as error:
        sys.stderr.write(f"nbdist doctor: {error}\n")
        return 2
    if args.report and isinstance(found, Diagnosis):
        text = found.report()
    else:
        text = json.dumps(found.to_json(), indent=1) if args.json else str(found)
    sys.stdout.write(text.rstrip("\n") + "\n")
    return found.exit_status


def _try(found: Diagnosis, *, preflight: bool, bandwidth: bool) -> Diagnosis:
    """Add what ranks of their own find and measure."""
    torch, count = found.facts.torch, num_ranks(found.facts)
    backend = "nccl" if seen_by_cuda(found.facts).devices and torch and torch.cuda_available else "gloo"
    findings, table = found.findings, None
    if preflight:
        findings += (*ranks.copies(), *ranks.run_preflight(count, backend))
    if bandwidth:
        answer = ranks.run_bandwidth(count, backend)
        if isinstance(answer, Finding):
            findings += (answer,)
        else:
            table = answer
    return replace(found, findings=findings, bandwidth=table)


def _pasted(path: Path) -> Facts:
    """The facts in a file that ``--json`` or ``--report`` wrote."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    block = re.search(r"```json\n(.*?)\n```", text, re.DOTALL)
    try:
        value = json.loads(block[1] if block else text)
    except ValueError:
        raise InputError(f"{path}: expected the output of nbdist doctor --json or --report") from None
    return Facts.from_json(value.get("facts", value) if isinstance(value, dict) else value)
