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
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

from nbdist import __version__
from nbdist.doctor import nccl_log
from nbdist.doctor.bandwidth import Bandwidth
from nbdist.doctor.checks import check, num_ranks
from nbdist.doctor.checks_gpu import link_table, seen_by_cuda
from nbdist.doctor.facts import Facts, gather
from nbdist.doctor.finding import VERDICTS, Finding, Verdict, html_of, lines_of, worst
from nbdist.errors import InputError

__all__ = ["Diagnosis", "diagnose", "main"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What the doctor found.

    Attributes
    ----------
    findings
        Of the checks, and of the pre-flight if it was run.
    bandwidth, nccl
        Measurements and the verdict on NCCL's logs, where asked for.
    """

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
        said = [f"{counts[v]} {words[v]}" for v in reversed(VERDICTS) if v in words and counts[v]]
        return f"nbdist doctor: {', '.join(said) or 'all is well'} ({counts['ok']} checks passed)"

    def __str__(self) -> str:
        blocks = ["\n".join([self.headline, *lines_of(self.findings)])]
        if table := link_table(self.facts):
            blocks.append("\n".join(table))
        blocks += [str(part) for part in (self.bandwidth, self.nccl) if part is not None]
        return "\n\n".join(blocks)

    def _repr_html_(self) -> str:
        table = link_table(self.facts)
        parts = [f"<p><b>{escape(self.headline)}</b></p>", html_of(self.findings)]
        if table:
            parts.append(f"<pre>{escape(chr(10).join(table))}</pre>")
        parts += [part._repr_html_() for part in (self.bandwidth, self.nccl) if part is not None]
        return "".join(parts)

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


class _Secrets:
    """Takes names of hosts and users, home folders and addresses out of a text."""

    def __init__(self, facts: Facts, hosts: Iterable[str] = ()) -> None:
        self._facts = facts
        try:
            user = getpass.getuser()
        except (OSError, KeyError):  # a user id without a name
            user = ""
        v = facts.variables
        names = [(facts.hostname or "", "<host>"), ((facts.hostname or "").split(".")[0], "<host>"), (user, "<user>")]
        names += [(v.get(n, ""), "<host>") for n in ("MASTER_ADDR", "SLURM_NODELIST", "SLURM_JOB_NODELIST")]
        names += [(host, f"<host {number}>") for number, host in enumerate(sorted(hosts), 1)]
        # Everyday words tell nobody's name, and cutting them out would spoil the text.
        everyday = {"root", "localhost", "docker", "jupyter", "nvidia", "torch", "ubuntu", "user", "gpu", "cpu"}
        self._names = [(n, to) for n, to in names if len(n) > 1 and n not in everyday]

    def hide(self, text: str) -> str:
        text = re.sub(r"/(?:home|Users|root)(?:/[^/\s\"':,;]+)?(?=[/\s\"':,;]|$)", "~", text)
        text = text.replace(str(Path.home()), "~") if str(Path.home()) != "/" else text
        for name, to in self._names:
            text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", to, text)
        text = re.sub(r"(?<![\d.])(?!127\.)\d{1,3}(?:\.\d{1,3}){3}(?![\d.])", "<address>", text)
        return re.sub(r"(?i)(?<![\w:-])(?:[0-9a-f]{1,4}:){2,7}(?:[0-9a-f]{1,4}|:[0-9a-f:]*)", "<address>", text)

    def facts(self) -> dict[str, Any]:
        """The facts, without those that are nothing but names."""
        value = self._facts.to_json()
        value.pop("hostname", None)
        value.pop("own_pids", None)
        kept = re.compile(
            r"(NCCL|GLOO|TORCH|PYTORCH|CUDA|NVIDIA|OMP|MKL)_|(LOCAL_)?(RANK|WORLD_SIZE)$|SLURM_(N|JOB_NUM)"
        )
        value["variables"] = {k: v if kept.match(k) else "<set>" for k, v in value.get("variables", {}).items()}
        if value.get("addresses"):
            value["addresses"] = {name: [] for name in value["addresses"]}
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
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_true", help="findings and facts as JSON")
    shape.add_argument("--report", action="store_true", help="text for a bug report, host and user names left out")
    parser.add_argument("-n", "--ranks", type=int, metavar="N", help="ranks planned (default: one per GPU, else 2)")
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="machines planned (default: 1)")
    parser.add_argument("--preflight", action="store_true", help="try copies, an all-reduce and a DataLoader in ranks")
    parser.add_argument("--bandwidth", action="store_true", help="measure all-reduce, all-gather and reduce-scatter")
    parser.add_argument(
        "--nccl-log",
        action="append",
        default=[],
        metavar="FILE",
        help="judge a log of NCCL_DEBUG=INFO (file or folder)",
    )
    parser.add_argument("--facts", type=Path, metavar="FILE", help="judge the facts of a --json or --report output")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``nbdist doctor``; returns the exit status (2: wrong arguments).

    Parameters
    ----------
    argv
        Words after ``nbdist doctor``; those of this process by default.
    """
    args = _parser().parse_args(argv)
    try:
        only_log = bool(args.nccl_log) and not (args.preflight or args.bandwidth or args.report or args.facts)
        if only_log:
            report = nccl_log.read(*args.nccl_log)
            _write(json.dumps(report.to_json(), indent=1) if args.json else str(report))
            return report.exit_status
        found = diagnose(
            nodes=args.nodes,
            ranks=args.ranks,
            facts=_pasted(args.facts) if args.facts else None,
            nccl_logs=args.nccl_log,
        )
        if args.preflight or args.bandwidth:
            found = _try(found, preflight=args.preflight, bandwidth=args.bandwidth)
    except InputError as error:
        sys.stderr.write(f"nbdist doctor: {error}\n")
        return 2
    if args.json:
        _write(json.dumps(found.to_json(), indent=1))
    else:
        _write(found.report() if args.report else str(found))
    return found.exit_status


def _write(text: str) -> None:
    sys.stdout.write(text.rstrip("\n") + "\n")


def _try(found: Diagnosis, *, preflight: bool, bandwidth: bool) -> Diagnosis:
    """Add what ranks of their own find and measure."""
    from nbdist.doctor import ranks

    seen = seen_by_cuda(found.facts)
    usable = bool(seen and seen.devices and found.facts.torch and found.facts.torch.cuda_available)
    backend, count = "nccl" if usable else "gloo", num_ranks(found.facts)
    findings, table = list(found.findings), None
    if preflight:
        findings += [*ranks.copies(), *ranks.run_preflight(count, backend)]
    if bandwidth:
        answer = ranks.run_bandwidth(count, backend)
        if isinstance(answer, Finding):
            findings.append(answer)
        else:
            table = answer
    return Diagnosis(facts=found.facts, findings=tuple(findings), bandwidth=table, nccl=found.nccl)


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
