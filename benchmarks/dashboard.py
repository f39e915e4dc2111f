"""The dashboard's bounds: many simulated ranks, fast metrics, a real JupyterLab in a real Chromium.

`python -m benchmarks.dashboard` prints what the kernel, the websocket and the page pay for 64 ranks that log 4 metrics
100 times a second each, whether any point was lost and the last values are exact; then how long a curve of a million
points takes to redraw. Needs the packages of the extra `test`, JupyterLab and Chromium.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import CDPSession

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

KERNEL_LIMIT, BYTES_LIMIT, STALL_LIMIT_MS, REDRAW_LIMIT_MS = 0.15, 300_000, 100, 50

# Runs in the kernel. The columns are made beforehand: what making them costs is paid by the ranks, not by the kernel.
FLOOD = """
import json, pathlib, threading, time
import numpy as np
import simulated as s
from nbdist.notebook.dashboard import Dashboard
from nbdist.wire.messages import Metrics, Sample

ranks, names, rate, seconds, every_s = {ranks}, {names}, {rate}, {seconds}, 0.1
run = s.make_run(ranks, device="cuda", backend="nccl")
board = Dashboard(run, mode="widget")
board.open()
total = int(rate * seconds)
steps = np.arange(total, dtype=float)
rng = np.random.default_rng(0)
curves = {{(name, rank): 2 * np.exp(-steps / 800) + rng.normal(0, 0.05, total) for name in names for rank in run.ranks}}
cpu = {{"add": 0.0, "push": 0.0, "all": 0.0}}

def feed():
    began, sent, seq, sampled = time.monotonic(), 0, 0, -1.0
    while sent < total:
        now = time.monotonic() - began
        upto = min(total, int(now * rate))
        if upto > sent:
            part = steps[sent:upto]
            times = run.started_s + part / rate
            described = [{{"name": name, "n": len(part)}} for name in names]
            message = Metrics(run_id="", seq=seq, series=described)
            packets = [[np.concatenate([part, times, curves[name, rank][sent:upto]]).tobytes() for name in names]
                       for rank in run.ranks]
            values = None
            if now - sampled >= 0.5:
                sampled = now
                values = [{{"steps": upto, "steps_per_s": rate, **s.gpu_sample(rank, upto)}} for rank in run.ranks]
            cpu_s = time.thread_time()
            for rank, buffers in zip(run.ranks, packets):
                run.history.add_metrics(rank, message, buffers)
            for rank, sample in zip(run.ranks, values or ()):
                run.history.add_sample(rank, Sample(run_id="", time_s=time.time(), values=sample))
            cpu["add"] += time.thread_time() - cpu_s
            seq, sent = seq + 1, upto
        cpu_s = time.thread_time()
        board.push()
        cpu["push"] += time.thread_time() - cpu_s
        time.sleep(every_s / 2)

began, process = time.monotonic(), time.process_time()
thread = threading.Thread(target=feed)
thread.start()
thread.join()
wall, cpu["all"] = time.monotonic() - began, time.process_time() - process
board.push(now=True)
last = {{name: [curves[name, rank][-1] for rank in run.ranks] for name in names}}
pathlib.Path("kernel.json").write_text(json.dumps(
    {{"wall": wall, "cpu": cpu, "last": last, "total": total, "lost": run.history.lost, "messages": board._feed.seq}}))
while not pathlib.Path("enough").exists():
    time.sleep(0.05)
run.ended_s = time.time()
board.finish()
"""

MILLION = """
import numpy as np, time
import simulated as s
from nbdist.notebook.dashboard import Dashboard
from nbdist.wire.messages import Metrics
run = s.make_run(2, ended_s=time.time(), status="ok")
steps = np.arange(1_000_000, dtype=float)
for rank in run.ranks:
    values = np.exp(-steps / 2e5) + np.random.default_rng(rank).normal(0, 0.02, len(steps))
    for k in range(100):
        part = slice(10_000 * k, 10_000 * (k + 1))
        buffer = np.concatenate([steps[part], run.started_s + steps[part] / 1e3, values[part]]).tobytes()
        run.history.add_metrics(rank, Metrics(run_id="", seq=k, series=[{"name": "loss", "n": 10_000}]), [buffer])
board = Dashboard(run, mode="widget")
board.open()
"""

STATE = """({
  missed: s.missed,
  gaps: [...s.curves.values()].filter((c) => c.gap).length,
  every: Math.max(...[...s.curves.values()].map((c) => c.every)),
})"""

REDRAW = """() => {
  const d = document.querySelector(".nbd").dashboard, times = [];
  for (let i = 0; i < 20; i++) { d.plot.weight = i % 2 ? 0.9 : 0; d.plot.draw(); times.push(d.plot.drawMs); }
  return times.sort((a, b) => a - b);
}"""


def _task_s(inspector: CDPSession) -> float:
    """CPU seconds that the page's main thread has spent."""
    metrics = inspector.send("Performance.getMetrics")["metrics"]
    return next(float(metric["value"]) for metric in metrics if metric["name"] == "TaskDuration")


def main() -> int:
    """Measure and print; 1 if a bound was missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dashboard", description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=64, help="(default: %(default)s)")
    parser.add_argument("--metrics", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--rate", type=float, default=100.0, help="points a second of each (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=60.0, help="(default: %(default)s)")
    parser.add_argument("--screenshot", type=Path, help="keep a picture of the page there")
    args = parser.parse_args()

    from browser.lab import Browser, Server, Sheet
    from deadlines import wait_until
    from playwright.sync_api import sync_playwright

    chromium = os.environ.get("NBDIST_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome") or ""
    names = [f"metric{i}" for i in range(args.metrics - 1)]
    cell = FLOOD.format(ranks=args.ranks, names=["loss", *names], rate=args.rate, seconds=args.seconds)
    with sync_playwright() as playwright:
        browser, server = Browser(playwright, chromium), Server()
        try:
            # short cells: a dashboard that is out of sight is not drawn
            (server.work / "flood.py").write_text(cell)
            (server.work / "million.py").write_text(MILLION)
            sheet = Sheet(server, browser, "flood.ipynb", ["import flood", "import million"])
            page = sheet.page
            page.set_default_timeout(1000 * (args.seconds + 120))
            sheet.run(0)
            sheet.wait_board("s.curves.size > 0")
            page.wait_for_timeout(2000)  # the page itself is still settling: not what is measured
            inspector = page.context.new_cdp_session(page)
            inspector.send("Performance.enable", {"timeDomain": "threadTicks"})  # CPU time: the machine may be busy
            page.evaluate("() => probe.reset()")
            began_s = _task_s(inspector)
            page.wait_for_timeout(max(1.0, args.seconds - 5) * 1000)
            page_cpu_s = _task_s(inspector) - began_s
            seen = page.evaluate("() => ({...probe, reset: null})")
            if args.screenshot:
                page.screenshot(path=str(args.screenshot))
            sheet.wait_board(f"s.curve('loss', {args.ranks - 1})?.total === {int(args.rate * args.seconds)}")
            wait_until((server.work / "kernel.json").exists, what="the kernel's own numbers")
            told = json.loads((server.work / "kernel.json").read_text())
            sheet.wait_board(f"s.state.columns.step[0] === {int(args.rate * args.seconds) - 1}")
            exact = sheet.board("s.state.columns.last") == told["last"]
            state = sheet.board(STATE)
            (server.work / "enough").touch()
            sheet.wait(0)
            sheet.run(1)
            sheet.wait_board("s.curve('loss', 1)?.total === 1000000")
            redraw = page.evaluate(REDRAW)
            note = page.locator(".nbd-note", has_text="Thinned").inner_text()
        finally:
            browser.close()
            server.close()

    wall, cpu = told["wall"], told["cpu"]
    product = (cpu["add"] + cpu["push"]) / wall
    rate = seen["bytes"] / max(1.0, args.seconds - 5)
    stalls = sorted(seen["stalls"], reverse=True)
    print(f"{args.ranks} ranks x {args.metrics} metrics x {args.rate:g} points/s for {args.seconds:g} s")
    rows = [
        (f"kernel: {product:.1%} of a core (history {cpu['add'] / wall:.1%}, feed {cpu['push'] / wall:.1%}; "
         f"whole process with simulated senders {cpu['all'] / wall:.1%})", product <= KERNEL_LIMIT),
        (f"websocket: {rate / 1000:.0f} kB/s in {seen['messages'] / max(1.0, args.seconds - 5):.1f} messages/s",
         rate <= BYTES_LIMIT),
        (f"page: longest stall {seen['longest_ms']:.0f} ms, {len(stalls)} above 50 ms, worst {stalls[:6]}; "
         f"{seen['drawn']} drawings, {1000 * page_cpu_s / max(1, seen['drawn']):.0f} ms of CPU each",
         seen["longest_ms"] <= STALL_LIMIT_MS),
        (f"lost: {state['missed']} messages of {told['messages']}, {state['gaps']} curves with gaps, "
         f"{told['lost'] or 'none'} from the ranks", not state["missed"] and not state["gaps"] and not told["lost"]),
        (f"last values exact: {exact}; one point stands for {state['every']}", exact),
        (f"redraw of 2 x 1,000,000 points: median {redraw[10]:.1f} ms, worst {redraw[-1]:.1f} ms ({note})",
         redraw[10] <= REDRAW_LIMIT_MS),
    ]  # fmt: skip
    for text, held in rows:
        print(f"{'ok    ' if held else 'MISSED'}  {text}")
    print(f"load of the machine meanwhile: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    return 0 if all(held for _, held in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
