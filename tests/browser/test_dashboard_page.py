"""The dashboard in a real JupyterLab: simulated ranks, everything else as the user has it."""

from __future__ import annotations

import math

import pytest
from deadlines import wait_until

pytestmark = [pytest.mark.requires_browser, pytest.mark.shared, pytest.mark.timeout(300)]

SETUP = "import simulated as s\n"
CPU = "metrics=s.METRICS, sample=s.cpu_sample"
# The cell goes on, without new numbers, until the test has seen enough and makes this file.
HELD = "import pathlib; hold = lambda: not pathlib.Path('enough').exists()\n"


@pytest.fixture(autouse=True)
def _not_enough(server):
    yield
    (server.work / "enough").unlink(missing_ok=True)


def enough(sheet) -> None:
    (sheet.server.work / "enough").touch()


def in_page(name: str, rank: int) -> str:
    return f"(() => {{ const c = s.curve('{name}', {rank}); return [c.total, [...c.step.slice(0, c.n)], [...c.value.slice(0, c.n)]]; }})()"


def test_a_run_is_live_and_then_a_picture_and_a_table(sheet):
    cell = SETUP + HELD + f"run = s.make_run(2)\nd = s.play(run, 4, hold=hold, text=True, {CPU})"
    one = sheet([cell, "import json; print(json.dumps([list(c) for c in zip(*run.history.series('loss', 1))]))"])
    one.run(0)
    one.page.locator(".nbd canvas").first.wait_for()
    one.page.evaluate("() => probe.reset()")
    one.page.wait_for_function("() => probe.drawn >= 10")
    assert one.running(0)
    one.wait_board("s.state.columns.step[0] > 100 && s.text.size === 2")
    one.screenshot("live")
    assert one.running(0)
    enough(one)
    one.wait(0)
    one.page.locator(".jp-OutputArea-output img").wait_for()
    assert one.page.locator(".jp-OutputArea-output tbody tr").count() == 2
    assert one.page.locator(".nbd").count() == 0
    one.screenshot("after")
    saved = one.save()
    shown = [set(output["data"]) for output in saved["cells"][0]["outputs"]]
    assert shown == [{"image/png", "text/plain"}, {"text/html", "text/plain"}]
    assert "widgets" not in saved["metadata"]
    one.open()  # as after closing and opening it again
    one.page.locator(".jp-OutputArea-output img").wait_for()
    assert "finished" not in one.page.locator(".jp-OutputArea-output table").inner_text()


def test_the_page_has_every_point(sheet):
    cell = SETUP + HELD + f"run = s.make_run(2)\nd = s.play(run, 3, hold=hold, total_steps=100, {CPU})"
    one = sheet([cell, "print([x.tolist() for x in run.history.series('loss', 1)])"])
    one.run(0)
    one.wait_board("s.curve('loss', 1)?.total === 100")
    total, steps, values = one.board(in_page("loss", 1))
    enough(one)
    one.wait(0)
    one.run(1)
    one.wait(1)
    told = eval(one.outputs(1)[0]["text"])
    assert total == 100
    assert steps == told[0]
    assert values == pytest.approx(told[2], rel=1e-6)


def test_stop_interrupts_the_kernel(sheet):
    one = sheet([SETUP + f"d = s.play(s.make_run(2), 600, {CPU})"])
    one.run(0)
    one.wait_board("s.state.columns.step[0] > 5")
    one.page.get_by_role("button", name="Stop", exact=True).click()
    one.wait(0)
    texts = [output.get("text", "") for output in one.outputs(0)]
    assert "interrupted\n" in texts
    assert "interrupted" in one.outputs(0)[0]["data"]["text/plain"]


@pytest.mark.case("OU18")
@pytest.mark.case("WM01")
def test_odd_names_and_values_are_shown_as_they_are(sheet):
    name = "<img src=x onerror=window.owned=1> $x$"
    cell = (
        SETUP
        + HELD
        + "import math\n"
        + f"run = s.make_run(2, name={name!r})\n"
        + "odd = lambda rank, step: {3: math.nan, 4: math.inf, 5: -math.inf}.get(step, 0.1 * step) if rank else 0.1 * step\n"
        + f"d = s.play(run, 2, hold=hold, total_steps=10, metrics={{'loss': odd, {name!r}: s.lr}},\n"
        + "           on_tick=lambda d, now: d.set_text(0, '<b>bold?</b> <script>window.owned=1</script>'))"
    )
    one = sheet([cell])
    one.run(0)
    one.wait_board("s.curve('loss', 1)?.total === 10 && s.state.columns.step[1] === 9 && s.text.size")
    _, steps, values = one.board(
        "(() => { const c = s.curve('loss', 1); return [c.total, [...c.step.slice(0, c.n)], [...c.value.slice(0, c.n)].map(String)]; })()"
    )
    assert steps == list(range(10))
    assert values[3:6] == ["NaN", "Infinity", "-Infinity"]
    assert one.board("s.state.bad") == [["loss", 1, 3, "nan", 3]]
    assert "loss is not finite on rank 1: nan first at step 3" in one.page.locator(".nbd-findings").inner_text()
    low, high = one.board("d.plot.yrange")
    assert -0.2 < low < 0 < 0.9 < high < 1.1
    assert one.board("s.state.columns.last.loss[1]") == pytest.approx(0.9)
    assert one.page.locator(".nbd-name").inner_text() == name
    assert "<b>bold?</b>" in one.page.locator(".nbd-text pre").inner_text()
    one.screenshot("odd")
    enough(one)
    one.wait(0)
    one.page.locator(".jp-OutputArea-output img").wait_for()
    assert one.page.locator(".jp-OutputArea-output ul").inner_text().startswith("loss is not finite")
    assert one.page.evaluate(
        "() => window.owned === undefined && !document.querySelector('.jp-OutputArea-output img[src=\"x\"]')"
    )


def test_values_can_be_read_zoomed_and_switched(sheet):
    one = sheet([SETUP + HELD + f"d = s.play(s.make_run(4), 3, hold=hold, total_steps=80, {CPU})"])
    one.run(0)
    one.wait_board("s.curve('loss', 3)?.total === 80")
    canvas = one.page.locator(".nbd-plot canvas").first
    box = canvas.bounding_box()
    canvas.hover(position={"x": box["width"] / 2, "y": 100})
    tip = one.page.locator(".nbd-tip")
    tip.wait_for()
    lines = tip.locator("div").all_inner_texts()
    assert lines[0].startswith("step ")
    assert lines[1].startswith("mean of 4 ranks")
    assert [line.split("\n")[0] for line in lines[2:]] == [f"rank {rank}" for rank in range(4)]
    step = int(lines[0].split()[1])
    at_step = one.board(f"s.curve('loss', 2).value[s.curve('loss', 2).step.indexOf({step})]")
    assert float(lines[4].split()[-1]) == pytest.approx(at_step, rel=1e-3)
    one.screenshot("values")
    # zoom by dragging, back by a double click
    one.page.mouse.move(box["x"] + 200, box["y"] + 80)
    one.page.mouse.down()
    one.page.mouse.move(box["x"] + 400, box["y"] + 80, steps=4)
    one.page.mouse.up()
    low, high = one.board("d.plot.zoom")
    assert 0 < low < high < 79
    canvas.dblclick()
    assert one.board("d.plot.zoom") is None
    # ranks off and on, log axis, smoothing, time, another metric
    chip = one.page.get_by_role("button", name="rank 1", exact=True).first
    chip.click()
    assert one.board("[...d.plot.on]") == [0, 2, 3]
    assert chip.get_attribute("aria-pressed") == "false"
    chip.click()
    for name, expression in (
        ("log", "d.plot.log"),
        ("time", "d.plot.axis === 'time'"),
        ("accuracy", "d.plot.name === 'accuracy'"),
    ):
        one.page.get_by_role("button", name=name, exact=True).click()
        one.wait_board(expression)
    one.page.get_by_label("smoothing").fill("0.9")
    one.wait_board("d.plot.weight === 0.9")
    one.screenshot("choices")
    # with the keys alone
    canvas.focus()
    for key in ("End", "ArrowLeft", "ArrowLeft", "+"):
        one.page.keyboard.press(key)
    assert one.board("d.plot.zoom !== null && d.plot.at !== null")
    tip.wait_for()
    one.page.keyboard.press("Escape")
    assert one.board("d.plot.zoom") is None
    for key in "dd":  # in JupyterLab this deletes a cell
        one.page.keyboard.press(key)
    assert "s.play" in one.page.locator(".jp-Cell .cm-content").first.inner_text()
    enough(one)
    one.wait(0)


def test_sixty_four_ranks_get_a_heat_strip(sheet, browser):
    cell = (
        SETUP
        + HELD
        + "d = s.play(s.make_run(64, device='cuda', backend='nccl', strategy='FSDP'), 4, hold=hold, metrics={'loss': s.loss}, sample=s.gpu_sample)"
    )
    one = sheet([cell])
    one.run(0)
    one.wait_board("s.curves.size === 64 && s.state.columns.step[63] > 20 && !d.plot.stripBox.hidden")
    assert one.page.locator(".nbd-chip").count() == 65
    assert one.page.locator(".nbd-track").count() == 128
    assert "18.00 GiB" in one.page.locator(".nbd-note", has_text="torch has reserved").inner_text()
    one.screenshot("64-ranks")
    enough(one)
    one.wait(0)
    one.page.locator(".jp-OutputArea-output img").wait_for()
    assert one.page.locator(".jp-OutputArea-output tbody tr").count() == 3


@pytest.mark.case("WM14")
def test_a_rank_that_died_is_marked(sheet):
    cell = (
        SETUP + HELD + "run = s.make_run(2)\n"
        "def die(d, now):\n"
        "    if now > 1: run.states[1] = 'died'\n"
        "d = s.play(run, 2, hold=hold, status='error', on_tick=die, total_steps=5, metrics={'loss': s.loss})"
    )
    one = sheet([cell])
    one.run(0)
    one.wait_board("s.state.columns.state[1] === 'died'")
    assert one.page.locator(".nbd-findings").inner_text().startswith("Rank 1 died after step 4; its curves end there.")
    one.screenshot("rank-died")
    enough(one)
    one.wait(0)
    assert "failed after" in one.outputs(0)[0]["data"]["text/plain"]


def test_a_second_view_shows_the_same_run(sheet):
    one = sheet([SETUP + HELD + f"d = s.play(s.make_run(2), 3, hold=hold, total_steps=80, {CPU})"])
    one.run(0)
    one.wait_board("s.curve('loss', 1)?.total > 20")
    one.page.evaluate("() => { window.jupyterapp.commands.execute('notebook:create-output-view'); }")
    one.page.wait_for_function("() => document.querySelectorAll('.nbd').length === 2")
    one.wait_board("s.curve('loss', 1).total === 80")
    one.page.wait_for_function(
        "() => { const [a, b] = [...document.querySelectorAll('.nbd')].map(n => n.dashboard); return a !== b && a.store === b.store; }"
    )
    one.screenshot("own-tab")
    enough(one)
    one.page.wait_for_function("() => !document.querySelector('.nbd')")


def test_a_finished_run_is_shown_again_and_kept(sheet):
    one = sheet([
        SETUP + f"run = s.make_run(2)\nd = s.play(run, 1.5, {CPU})",
        "from nbdist.notebook.dashboard import Dashboard\nagain = Dashboard(run)\nagain.open()",
    ])  # fmt: skip
    one.run(0)
    one.wait(0)
    one.run(1)
    one.wait_board("s.state.status === 'ok' && s.curve('lr', 1)?.total === s.curve('loss', 0).total")
    one.page.get_by_role("button", name="Keep as figure").click()
    figure = [{"image/png", "text/plain"}, {"text/html", "text/plain"}]
    wait_until(lambda: [set(output["data"]) for output in one.outputs(1)] == figure, what="the figure and the table")


BACKGROUND = (
    SETUP
    + f"""
import threading
from nbdist.notebook.dashboard import Dashboard
run = s.make_run(2)
over = threading.Event()
board = Dashboard(run, on_stop=over.set)
board.open()
ranks = s.Ranks(run=run, {CPU})
def feed():
    while not over.wait(0.05):
        ranks.advance()
        board.push()
    import time
    run.ended_s, run.status = time.time(), "interrupted"
    board.finish()
threading.Thread(target=feed).start()
"""
)


def test_a_run_in_the_background_comes_back_after_a_reload(sheet):
    one = sheet([BACKGROUND, "1 + 1"])
    one.run(0)
    one.wait(0)
    one.wait_board("s.curve('loss', 1)?.total > 20")
    one.save()
    one.open()
    # New points may come before the page has asked for what it missed.
    one.wait_board("s.curve('loss', 1)?.total > 40 && s.curve('loss', 1).step[0] === 0")
    steps = one.board("[...s.curve('loss', 1).step.slice(0, s.curve('loss', 1).n)]")
    assert steps == list(range(len(steps)))
    one.run(1)
    one.wait(1)
    one.screenshot("background")
    one.page.get_by_role("button", name="Stop", exact=True).click()
    one.page.wait_for_function("() => !document.querySelector('.nbd')")
    assert math.isfinite(len(one.outputs(0)))
