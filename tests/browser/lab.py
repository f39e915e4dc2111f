"""A real Jupyter server with folders of its own, and a real Chromium looking at it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deadlines import CELL_S, GONE_S, START_S, wait_until
from playwright.sync_api import Error, Page, Playwright

__all__ = ["Browser", "Server", "Sheet"]

HERE = Path(__file__).resolve().parent

ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    # a page that nobody looks at must still run its timers and frames
    "--disable-background-timer-throttling",
    "--disable-renderer-backgrounding",
    "--disable-backgrounding-occluded-windows",
    # nothing but the server can be reached: what a page asks for elsewhere fails, and is counted
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A Jupyter server for one folder.

    Parameters
    ----------
    dark
        JupyterLab's dark theme.
    app
        ``lab`` or ``notebook``.
    without
        JupyterLab extensions that this server does not have.
    """

    def __init__(self, *, dark: bool = False, app: str = "lab", without: Sequence[str] = ()) -> None:
        self.app = app
        self.root = Path(tempfile.mkdtemp(prefix="nbl-"))
        self.work = self.root / "work"
        for name in ("work", "config/labconfig", "run"):
            (self.root / name).mkdir(parents=True)
        disabled = json.dumps({"disabledExtensions": dict.fromkeys(without, True)})
        (self.root / "config/labconfig/page_config.json").write_text(disabled)
        self._setting("@jupyterlab/apputils-extension/notification", fetchNews="false", checkForUpdates=False)
        if dark:
            self._setting("@jupyterlab/apputils-extension/themes", theme="JupyterLab Dark")
        # 127.0.0.1 and a port that was free a moment ago: the server retries none, so a clash shows at once
        self.url = f"http://127.0.0.1:{_free_port()}"
        paths = {
            "JUPYTER_CONFIG_DIR": "config",
            "JUPYTER_DATA_DIR": "data",
            "JUPYTER_RUNTIME_DIR": "run",
            "JUPYTERLAB_SETTINGS_DIR": "settings",
            "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
            "IPYTHONDIR": "ipython",
        }
        environment = os.environ | {name: str(self.root / path) for name, path in paths.items()}
        environment |= {"JUPYTER_PLATFORM_DIRS": "0", "PYTHONPATH": str(HERE.parent)}
        environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
        self._log = (self.root / "server.log").open("w")
        flags = {
            "ServerApp.ip": "127.0.0.1",
            "ServerApp.port": self.url.rpartition(":")[2],
            "ServerApp.port_retries": "0",
            "ServerApp.root_dir": str(self.work),
            "IdentityProvider.token": "only-for-this-test",
            f"{'LabApp' if app == 'lab' else 'JupyterNotebookApp'}.expose_app_in_browser": "True",
        }
        command = [sys.executable, "-m", "jupyter", app, "--no-browser", "--allow-root"]
        self._process = subprocess.Popen(
            command + [f"--{name}={value}" for name, value in flags.items()],
            env=environment,
            cwd=self.work,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        wait_until(self._answers, START_S, "the Jupyter server answers")

    def _setting(self, plugin: str, **values: Any) -> None:
        file = self.root / "settings" / f"{plugin}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))

    def _answers(self) -> bool:
        if self._process.poll() is not None:
            raise RuntimeError(f"the Jupyter server ended: {self.log()[-2000:]}")
        try:
            self.api("api/status")
        except OSError:
            return False
        return True

    def log(self) -> str:
        return (self.root / "server.log").read_text()

    def api(self, path: str, method: str = "GET") -> Any:
        headers = {"Authorization": "token only-for-this-test"}
        request = urllib.request.Request(f"{self.url}/{path}", method=method, headers=headers)
        with urllib.request.urlopen(request, timeout=20) as reply:
            body = reply.read()
        return json.loads(body) if body else None

    def copy(self, name: str, source: Path) -> None:
        """A notebook of the project, as before its first run."""
        book = json.loads(source.read_text(encoding="utf-8"))
        for cell in book["cells"]:
            if cell["cell_type"] == "code":
                cell |= {"outputs": [], "execution_count": None}
        (self.work / name).write_text(json.dumps(book))

    def write(self, name: str, cells: Sequence[str]) -> None:
        """A notebook of these code cells."""
        code = [
            {"cell_type": "code", "id": f"c{i}", "metadata": {}, "source": c, "outputs": [], "execution_count": None}
            for i, c in enumerate(cells)
        ]
        kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
        book = {"cells": code, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
        (self.work / name).write_text(json.dumps(book))

    def read(self, name: str) -> dict[str, Any]:
        """A notebook as it was saved."""
        book: dict[str, Any] = json.loads((self.work / name).read_text())
        return book

    def end_kernels(self) -> None:
        with contextlib.suppress(OSError):
            for session in self.api("api/sessions"):
                self.api(f"api/sessions/{session['id']}", "DELETE")
            for kernel in self.api("api/kernels"):
                self.api(f"api/kernels/{kernel['id']}", "DELETE")

    def close(self) -> None:
        self.end_kernels()
        self._process.terminate()
        try:
            self._process.wait(GONE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
        shutil.rmtree(self.root, ignore_errors=True)


class Browser:
    """A headless Chromium with a profile of its own."""

    def __init__(self, playwright: Playwright, chromium: str, *, width: int = 1280, height: int = 1000) -> None:
        self._profile = tempfile.mkdtemp(prefix="nbc-")
        self._context = playwright.chromium.launch_persistent_context(
            self._profile,
            executable_path=chromium,
            headless=True,
            args=ARGUMENTS,
            viewport={"width": width, "height": height},
            env=os.environ | {"XDG_RUNTIME_DIR": self._profile},
        )
        self.asked_elsewhere: list[str] = []
        self._context.on("request", lambda request: self._note(request.url))
        self._context.add_init_script(path=str(HERE / "probe.js"))

    def _note(self, url: str) -> None:
        if not url.startswith(("http://127.0.0.1", "data:", "blob:", "about:", "chrome")):
            self.asked_elsewhere.append(url)

    def page(self) -> Page:
        page = self._context.new_page()
        page.set_default_timeout(1000 * CELL_S)
        return page

    def close(self) -> None:
        self._context.close()
        shutil.rmtree(self._profile, ignore_errors=True)


class Sheet:
    """A notebook open in a page."""

    def __init__(self, server: Server, browser: Browser, name: str, cells: Sequence[str] | Path) -> None:
        self.server, self.name = server, name
        if isinstance(cells, Path):
            server.copy(name, cells)
        else:
            server.write(name, cells)
        self.page = browser.page()
        self.errors: list[str] = []
        self.page.on("pageerror", self._note)
        self.open()

    def _note(self, error: Error) -> None:
        """Keep errors of the dashboard's module, which is loaded from a blob; JupyterLab and Notebook have their own."""
        if "blob:" in (error.stack or ""):
            self.errors.append(f"{error}\n{error.stack}")

    @property
    def _panel(self) -> str:
        return "window.jupyterapp?.shell?.currentWidget"

    def open(self) -> None:
        """Open the notebook, or open it again, and wait for its kernel."""
        place = f"doc/tree/{self.name}?reset&" if self.server.app == "lab" else f"notebooks/{self.name}?"
        self.page.goto(f"{self.server.url}/{place}token=only-for-this-test")
        self.page.wait_for_selector(".jp-NotebookPanel .jp-Cell")
        self.page.wait_for_function(
            f"() => {{ const s = {self._panel}?.context?.sessionContext; "
            "return s?.isReady && ['idle', 'busy'].includes(s.session?.kernel?.status); }"
        )
        self.page.wait_for_function("() => !document.querySelector('#jupyterlab-splash')")

    def run(self, index: int) -> None:
        """Start a cell; does not wait."""
        self.page.evaluate(
            f"i => {{ const p = {self._panel}; p.content.activeCellIndex = i; p.content.deselectAll(); "
            "window.jupyterapp.commands.execute('notebook:run-cell'); }",
            index,
        )

    def running(self, index: int) -> bool:
        """Whether a cell runs. (The kernel's status is no guide: it says idle while a cell runs.)"""
        return bool(self.page.evaluate(f"i => {self._model('i')}.executionCount === null", index))

    def _model(self, index: str) -> str:
        return f"{self._panel}.content.widgets[{index}].model"

    def wait(self, index: int) -> None:
        """Until a cell has ended."""
        self.page.wait_for_function(
            f"i => {self._model('i')}.executionCount !== null && {self._model('i')}.executionState !== 'running'",
            arg=index,
        )

    def outputs(self, index: int) -> list[dict[str, Any]]:
        """A cell's outputs, as they would be saved."""
        found: list[dict[str, Any]] = self.page.evaluate(f"i => {self._model('i')}.outputs.toJSON()", index)
        return found

    def save(self) -> dict[str, Any]:
        """Save, and return what was saved."""
        self.page.evaluate("() => { window.jupyterapp.commands.execute('docmanager:save'); }")
        self.page.wait_for_function(f"() => !{self._panel}.context.model.dirty")
        return self.server.read(self.name)

    def board(self, expression: str, *, index: int = 0) -> Any:
        """What the n-th dashboard in the page knows: an expression of `d`, its view, and `s`, its store."""
        script = (
            f"i => {{ const d = document.querySelectorAll('.nbd')[i].dashboard, s = d.store; return {expression}; }}"
        )
        return self.page.evaluate(script, index)

    def wait_board(self, expression: str) -> None:
        """Until an expression of the dashboard's view `d` and store `s` is true."""
        self.page.wait_for_function(
            "() => { const d = document.querySelector('.nbd')?.dashboard, s = d?.store; "
            f"return Boolean(d && s.state && ({expression})); }}"
        )

    def screenshot(self, name: str) -> None:
        """Keep a picture of the page where NBDIST_SCREENSHOTS says; nowhere otherwise."""
        if folder := os.environ.get("NBDIST_SCREENSHOTS"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.page.screenshot(path=str(Path(folder) / f"{name}.png"))

    def close(self) -> None:
        self.page.close()
        self.server.end_kernels()
