"""The quickstart in a real JupyterLab, real ranks training, and the page reloaded in the middle of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from deadlines import wait_until

pytestmark = [pytest.mark.requires_browser, pytest.mark.shared, pytest.mark.timeout(300)]

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "00_quickstart.ipynb"
FIGURE = [{"image/png", "text/plain"}, {"text/html", "text/plain"}]
IDLE = (
    "() => { const s = window.jupyterapp.shell.currentWidget.context.sessionContext.session;"
    " return s.kernel.status === 'idle'; }"
)


def displays(one, index: int) -> list[set[str]]:
    return [set(output["data"]) for output in one.outputs(index) if output["output_type"] == "display_data"]


def test_the_quickstart_is_live_and_survives_a_reload(sheet):
    pytest.importorskip("sklearn", reason="the quickstart's data comes with scikit-learn")
    one = sheet(NOTEBOOK)
    sources = one.page.evaluate(
        "() => window.jupyterapp.shell.currentWidget.content.widgets.map(w => w.model.type === 'code' ? "
        "w.model.sharedModel.getSource() : '')"
    )
    first, second = (i for i, source in enumerate(sources) if "backward()" in source and "--name" in source)
    for index in (i for i, source in enumerate(sources[:first]) if source):
        one.run(index)
        one.wait(index)

    one.run(first)
    # What is out of sight is not drawn.
    one.page.locator(".nbd").evaluate("node => node.scrollIntoView({ block: 'center' })")
    one.wait_board("s.curve('loss', 1)?.total > 5")
    one.page.evaluate("() => probe.reset()")
    one.page.wait_for_function("() => probe.drawn >= 10")
    assert one.running(first)
    columns = one.board("s.state.columns")
    assert set(columns["parts"]) == {"data_s", "forward_s", "backward_s", "wait_s", "optimizer_s", "rest_s"}
    assert columns["memory"]["parameters"][0] == columns["memory"]["gradients"][0] > 10**6
    assert "epoch" in one.board("s.state.progress.name") or one.board("s.state.progress.total") == 12
    one.screenshot("quickstart")
    one.wait(first)
    assert displays(one, first) == FIGURE
    saved = one.save()
    assert not saved["metadata"].get("widgets")
    one.open()  # as after closing and opening it again
    one.page.locator(".jp-OutputArea-output img").first.wait_for()

    for index in (i for i in range(first + 1, second) if sources[i]):
        one.run(index)
        one.wait(index)
    one.run(second)
    one.wait_board("s.curve('loss', 1)?.total > 5")
    one.open()  # in the middle of the run
    one.page.wait_for_function(IDLE)
    one.page.evaluate(
        "() => { const p = window.jupyterapp.shell.currentWidget; p.content.activeCellIndex = 0;"
        " p.content.activeCell.model.sharedModel.setSource("
        "'from nbdist.notebook.dashboard import Dashboard\\n"
        'run = get_ipython().run_line_magic("distributed", "history")\\nDashboard(run).open()\');'
        " window.jupyterapp.commands.execute('notebook:change-cell-to-code'); }"
    )
    one.run(0)
    one.wait_board("s.state.status === 'ok' && s.curve('loss', 1)")
    total, start = one.board("[s.curve('loss', 1).total, s.curve('loss', 1).step[0]]")
    assert (total, start) == (12 * 23, 1)
    one.screenshot("quickstart-after-reload")
    one.page.get_by_role("button", name="Keep as figure").click()
    wait_until(lambda: displays(one, 0) == FIGURE, what="the figure and the table")
