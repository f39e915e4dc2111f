"""Where the dashboard is shown: a server without anywidget, Notebook 7, the dark theme, a narrow page."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browser.lab import Server

pytestmark = [pytest.mark.requires_browser, pytest.mark.shared, pytest.mark.timeout(300)]

RUN = "import simulated as s\nd = s.play(s.make_run(2), 2, mode='auto', metrics=s.METRICS, sample=s.cpu_sample)"
HELD = (
    "import pathlib, simulated as s\nhold = lambda: not pathlib.Path('enough').exists()\n"
    "d = s.play(s.make_run(2), 3, hold=hold, metrics=s.METRICS, sample=s.cpu_sample)"
)


@pytest.fixture(scope="module")
def bare() -> Iterator[Server]:
    started = Server(without=["anywidget"])
    yield started
    started.close()


@pytest.fixture(scope="module")
def notebook() -> Iterator[Server]:
    started = Server(app="notebook", dark=True)
    yield started
    started.close()


def test_a_server_without_anywidget_is_noticed_and_the_package_named(sheet, bare):
    one = sheet([RUN, RUN.replace("make_run(2)", "make_run(2, name='run 2')"), "print(d.mode)"], on=bare)
    one.run(0)
    one.wait(0)
    table = one.page.locator(".jp-OutputArea-output table").first
    table.wait_for()
    one.page.locator(
        ".jp-OutputArea-output li", has_text="install anywidget in the environment that the Jupyter"
    ).wait_for()
    one.run(1)
    one.page.locator(".jp-OutputArea-output pre", has_text="run 2 · 2 ranks on cpu · gloo").wait_for()
    one.screenshot("no-anywidget")
    one.wait(1)
    one.run(2)
    one.wait(2)
    assert one.outputs(2)[0]["text"] == "text\n"
    assert [set(output["data"]) for output in one.outputs(1)] == [
        {"image/png", "text/plain"},
        {"text/html", "text/plain"},
    ]


def test_notebook_7_shows_it_dark_and_narrow(sheet, notebook):
    one = sheet([HELD], on=notebook)
    one.page.set_viewport_size({"width": 620, "height": 1000})
    one.run(0)
    one.wait_board("s.curve('loss', 1)?.total > 60")
    one.screenshot("notebook-7-dark-narrow")
    ink, paper = one.board("[d.ink.ink, d.ink.paper]")
    assert ink != paper
    assert max(int(c) for c in one.board("d.ink.paperRgb")) < 80  # JupyterLab's dark theme
    assert one.page.evaluate(
        "() => document.querySelector('.nbd').scrollWidth <= document.querySelector('.nbd').clientWidth"
    )
    (notebook.work / "enough").touch()
    one.wait(0)
    one.page.locator(".jp-OutputArea-output img").wait_for()
