"""What every test stands on: an environment of its own, markers that say why they skip, and the leak check."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import traces
from case_table import rows
from deadlines import GONE_S, Late, wait_until

HERE = Path(__file__).resolve().parent

# Cheap before dear: a broken unit test is seen before a browser is started.
ORDER = ["unit", "train", "cluster", "magics", "cases", "notebooks", "browser", "gpu"]
WATCHED_FOR_LEAKS = {"train", "cluster", "magics", "cases", "notebooks", "browser", "gpu"}
CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

_runtime: Path
_outcomes: dict[str, str] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the longer forms (marked full)")


def pytest_configure(config: pytest.Config) -> None:
    """Give the session folders of its own, so that neither a user's settings nor another session is met."""
    global _runtime
    base = Path(tempfile.mkdtemp(prefix="nbt-"))
    _runtime = base / "run"  # short: a unix socket's path may have about 100 bytes
    for name in ("run", "jupyter", "ipython", "state"):
        (base / name).mkdir(mode=0o700)
    os.environ.update(
        {
            traces.SESSION_VARIABLE: uuid.uuid4().hex,
            "XDG_RUNTIME_DIR": str(_runtime),
            "IPYTHONDIR": str(base / "ipython"),
            "JUPYTER_CONFIG_DIR": str(base / "jupyter"),
            "JUPYTER_RUNTIME_DIR": str(_runtime),
            "JUPYTER_PLATFORM_DIRS": "1",
            "XDG_STATE_HOME": str(base / "state"),
            "MPLBACKEND": "agg",
        }
    )
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    config.add_cleanup(lambda: shutil.rmtree(base, ignore_errors=True))


# ---- which tests run


def _folder(item: pytest.Item) -> str:
    path = Path(item.path)
    return path.relative_to(HERE).parts[0] if path.is_relative_to(HERE) else ""


def find_chromium() -> str | None:
    """The browser that tests use: NBDIST_CHROMIUM, or the first one on the path."""
    return os.environ.get("NBDIST_CHROMIUM") or next(filter(None, map(shutil.which, CHROMIUM_NAMES)), None)


def _why_no_gpus(wanted: int) -> str | None:
    import torch

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found >= wanted:
        return None
    why = "this torch was built without CUDA" if torch.version.cuda is None else "torch finds no usable NVIDIA driver"
    return f"needs {wanted} GPU{'s' if wanted > 1 else ''}, found {found}" + (f" ({why})" if not found else "")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda i: ORDER.index(_folder(i)) if _folder(i) in ORDER else len(ORDER))
    must_browse = os.environ.get("NBDIST_REQUIRE_BROWSER") == "1"
    for item in items:
        if item.get_closest_marker("full") and not config.getoption("--full"):
            item.add_marker(pytest.mark.skip(reason="a longer form: run with --full"))
        if (marker := item.get_closest_marker("requires_gpus")) and (why := _why_no_gpus(*marker.args)):
            item.add_marker(pytest.mark.skip(reason=why))
        if item.get_closest_marker("requires_browser") and find_chromium() is None and not must_browse:
            item.add_marker(pytest.mark.skip(reason=f"no Chromium found (looked for {', '.join(CHROMIUM_NAMES)})"))


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of the browser; an error where NBDIST_REQUIRE_BROWSER=1 and there is none."""
    found = find_chromium()
    if found is None:
        pytest.fail(f"NBDIST_REQUIRE_BROWSER=1, but no Chromium was found (looked for {', '.join(CHROMIUM_NAMES)})")
    return found


# ---- nothing may be left


def _check(before: traces.Traces, who: str) -> None:
    gc.collect()  # what is only waiting for the collector is not a leak
    left: list[str] = []

    def clean() -> bool:
        left[:] = traces.take(_runtime).beyond(before)
        return not left

    try:
        wait_until(clean, GONE_S, "nothing left behind")
    except Late:
        pytest.fail(f"{who} left behind, {GONE_S:g} s after it ended:\n  " + "\n  ".join(left), pytrace=False)


@pytest.fixture(scope="module", autouse=True)
def _module_leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    path = Path(request.path)
    if not path.is_relative_to(HERE) or path.relative_to(HERE).parts[0] not in WATCHED_FOR_LEAKS:
        yield
        return
    before = traces.take(_runtime)
    yield
    _check(before, request.node.name)


@pytest.fixture(autouse=True)
def _test_leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check after each test, or, where a module shares a cluster or kernel (marker shared), after its last."""
    if _folder(request.node) not in WATCHED_FOR_LEAKS or request.node.get_closest_marker("shared"):
        yield
        return
    before = traces.take(_runtime)
    yield
    _check(before, request.node.name)


# ---- the table of cases: each named test must have run


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    report = yield
    if report.failed or report.skipped or report.when == "call":
        gpu_only = report.skipped and item.get_closest_marker("requires_gpus")
        worse = _outcomes.get(item.nodeid) == "failed"
        if not worse:
            _outcomes[item.nodeid] = "skipped for want of a GPU" if gpu_only else report.outcome
    return report


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """In CI, a case's test that was selected but did not run fails the session."""
    if os.environ.get("CI") != "true" or exitstatus not in (0, 1) or session.config.getoption("collectonly"):
        return
    selected = {item.nodeid.split("[")[0]: item.nodeid for item in session.items}
    idle = [
        f"{row.case}: {test}"
        for row in rows()
        for test in row.tests
        if test in selected and _outcomes.get(selected[test], "not run") in ("skipped", "not run")
    ]
    if idle:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.write_line("cases whose test did not run:\n  " + "\n  ".join(idle), red=True)
