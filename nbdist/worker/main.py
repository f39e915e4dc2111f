"""A rank: the main thread runs cells, one I/O thread speaks with the notebook, so that it answers while a cell runs."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import queue
import random
import signal
import sys
import threading
import time
import types
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbdist.errors import WireError
from nbdist.wire import messages as m
from nbdist.wire import values
from nbdist.wire.channel import Dialer, Packet, Poller, Waker

if TYPE_CHECKING:
    from nbdist.worker.shell import Outcome

__all__ = ["Rank", "run_rank"]

_POLL_S = 1.0
_STALE_POLL_S = 0.05
_FLUSH_S = 1.0


class Rank:
    """One rank of a cluster.

    Parameters
    ----------
    spec
        From the notebook: rank, world_size, num_gpus, backend, device, folder, key, token, generation, replacing,
        notebook_pid.
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        from nbdist.worker.streams import Streams

        self.spec = spec
        self.rank: int = spec["rank"]
        self.world_size: int = spec["world_size"]
        self.folder = Path(spec["folder"])
        self.streams = Streams(spec["token"])
        self.streams.restore()
        self._inbox: queue.SimpleQueue[Packet] = queue.SimpleQueue()
        self._outbox: deque[tuple[m.Message, Sequence[bytes | memoryview]]] = deque()
        self._waker = Waker()
        self._leaving = False
        self._run_id: str | None = None
        self._last_run_id: str | None = None
        self._memfds: set[str] = set()
        self._main_thread = threading.get_ident()
        self._idle_since_s = time.time()
        # Written by signal handlers in C: what a rank does that holds the GIL, for `%distributed where --full`, and
        # where it stood when it crashed.
        self._stacks = open(self.folder / f"stack-{self.rank}", "w")  # noqa: SIM115 (open as long as the process)
        faulthandler.register(signal.SIGUSR1, file=self._stacks, all_threads=False, chain=False)
        faulthandler.enable(file=self._stacks, all_threads=True)
        self._stood: tuple[int, int] | None = None
        self._to_stop: str | None = None  # the run that was interrupted last
        signal.signal(signal.SIGINT, _ignore)

    # ---- both threads

    def send(self, message: m.Message, buffers: Sequence[bytes | memoryview] = ()) -> None:
        """Queue a message for the notebook (any thread)."""
        self._outbox.append((message, buffers))
        self._waker.wake()

    def notice(self, text: str) -> None:
        """Show one line to the user (any thread)."""
        self.send(m.Notice(text=text, run_id=self._run_id))

    # ---- main thread

    def start(self) -> None:
        """Come up: device, process group, shell; then say so. Raises what hinders it."""
        import torch
        import torch.distributed as dist

        from nbdist.worker import spawn, telemetry
        from nbdist.worker.group import Group
        from nbdist.worker.shell import make_shell
        from nbdist.worker.steps import Steps

        threading.Thread(target=self._io, name="nbdist-io", daemon=True).start()
        if self.world_size > 1:
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1").split(",")[0] or 1))
        device = torch.device("cpu")
        if self.spec["device"] == "cuda":
            device = torch.device("cuda", self.rank % self.spec["num_gpus"])
            torch.cuda.set_device(device)
        self.telemetry = telemetry.Telemetry(self._send_now, rank=self.rank, device=device)
        telemetry.current = self.telemetry
        self.group = Group(
            rank=self.rank,
            world_size=self.world_size,
            backend=self.spec["backend"],
            folder=self.folder,
            device=device,
            notice=self.notice,
        )
        self.group.patch()
        if self.spec["replacing"]:  # the others renew their group: take part in what they agree on
            self.group.renew(self.spec["generation"], {}, attach=False)
        else:
            self.group.join(self.spec["generation"])
        self.steps = Steps(self.telemetry, notice=self.notice)
        self.steps.halted = lambda steps: self.send(
            m.StepHalted(run_id=self._run_id or "", steps=steps, grace_s=self.steps.grace_s)
        )
        self.steps.install()
        spawn.install()
        namespace = {
            "rank": self.rank,
            "local_rank": int(os.environ["LOCAL_RANK"]),
            "world_size": self.world_size,
            "device": device,
            "dist": dist,
            "torch": torch,
            "nbdist": sys.modules["nbdist"],
        }
        self.shell = make_shell(namespace, self._publish, self._publish_clear)
        self.send(
            m.Ready(
                pid=os.getpid(),
                generation=self.spec["generation"],
                device=str(device),
                backend=self.group.backend,
                torch_version=torch.__version__,
            )
        )

    def serve(self) -> None:
        """Do what the notebook asks, one thing after another, for ever."""
        actions: dict[type[m.Message], Callable[..., None]] = {
            m.ExecuteRequest: self._execute,
            m.PushRequest: self._push,
            m.PullRequest: self._pull,
            m.RenewRequest: self._renew,
        }
        while True:
            packet = self._inbox.get()
            actions[type(packet.message)](packet.message, packet.buffers)
            del packet

    def _execute(self, request: m.ExecuteRequest, _: object) -> None:
        from nbdist.worker.hints import find_hint, is_out_of_memory, is_secondary
        from nbdist.worker.shell import Outcome, RankShell

        self._run_id = request.run_id
        self.telemetry.begin(request.run_id, interval_s=request.interval_s)
        try:
            self.group.begin_cell(request.ranks, self.shell.user_ns)
            self.steps.begin(request.run_id, request.watch)
            if request.autoreload:
                self.shell.autoreload(request.autoreload)
            if signal.getsignal(signal.SIGINT) is _ignore:  # else it is a handler that an earlier cell has set
                signal.signal(signal.SIGINT, signal.default_int_handler)
            if self._to_stop == request.run_id:  # the interrupt came before the cell could hear it
                raise KeyboardInterrupt
            outcome = self._run(request)
        except BaseException as error:  # an interrupt that came at the very end, or a group that could not be made
            outcome = Outcome(
                status="interrupted" if isinstance(error, KeyboardInterrupt) else "error",
                ename=type(error).__name__,
                evalue=str(error),
                traceback=[f"{type(error).__name__}: {error}"],
                error=error,
            )
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _ignore)
        ended_s = time.time()
        secondary = is_secondary(outcome.error)
        hint = find_hint(outcome.error, self.shell.user_ns) if outcome.error is not None else None
        if is_out_of_memory(outcome.error):  # while the frames of the cell still hold what they held
            outcome.traceback += self.telemetry.memory.explain_failure()
        # After an agreed stop every rank stands behind the same collectives: nothing is half sent.
        agreed = outcome.status == "interrupted" and self.steps.agreed
        communicated = self.group.communicated and not agreed
        if outcome.status != "ok" and communicated:
            # Peers may wait for a collective this rank will never join: they are freed without asking anybody.
            self.group.give_up(f"rank {self.rank} stopped: {outcome.ename}")
        self.steps.end()
        self.telemetry.end()
        RankShell.forget(outcome)
        self.streams.restore()
        reply = m.ExecuteReply(
            run_id=request.run_id,
            status=outcome.status,
            mark=self.streams.mark("e"),
            ended_s=ended_s,
            ename=outcome.ename,
            evalue=outcome.evalue,
            traceback=outcome.traceback,
            secondary=secondary,
            group=self.group.state,
            communicated=communicated,
            steps=self.steps.count,
            hint=hint,
            exit_code=outcome.exit_code,
            details=outcome.details or None,
        )
        self._last_run_id, self._run_id = self._run_id, None
        self._idle_since_s = time.time()
        self.send(reply)

    def _run(self, request: m.ExecuteRequest) -> Outcome:
        if request.profile_steps is None or self.rank not in (request.profile_ranks or [0]):
            return self.shell.run(request.code, request.cell)
        from nbdist.train.profile import profile

        with profile(request.profile_steps, ranks=[self.rank]) as found:
            outcome = self.shell.run(request.code, request.cell)
        self._publish({"text/plain": str(found), "text/html": found._repr_html_()}, {}, None, False, False)
        return outcome

    def _publish(
        self, data: dict[str, Any], metadata: dict[str, Any], display_id: str | None, update: bool, result: bool
    ) -> None:
        if self._run_id is None:
            return
        self.send(
            m.DisplayData(
                run_id=self._run_id,
                mark=self.streams.mark("d"),
                data=_jsonable(data),
                metadata=metadata,
                display_id=display_id,
                update=update,
                result=result,
            )
        )

    def _publish_clear(self, wait: bool) -> None:
        if self._run_id is not None:
            self.send(m.ClearOutput(run_id=self._run_id, mark=self.streams.mark("d"), wait=wait))

    def _push(self, request: m.PushRequest, buffers: Sequence[memoryview]) -> None:
        try:
            data, parts = buffers[0], list(buffers[1:])
            if request.memfd is not None:
                parts = values.map_memfd(request.memfd, request.sizes or [], alone=request.alone)
            found = values.loads(data, parts)
            self.shell.user_ns.update(dict(zip(request.names, found, strict=True)))
        except Exception as error:  # unpickling runs the classes' own code
            self.send(m.PushReply(status="error", evalue=f"{type(error).__name__}: {error}"))
        else:
            self.send(m.PushReply(status="ok"))

    def _pull(self, request: m.PullRequest, _: object) -> None:
        try:
            value = eval(compile(request.name, "<pull>", "eval"), self.shell.user_ns)
            data, buffers = values.dumps(value)
        except Exception as error:  # the user's expression and classes may raise anything
            self.send(m.PullReply(status="error", ename=type(error).__name__, evalue=str(error)))
            return
        sizes = [b.nbytes for b in buffers]
        if sum(sizes) < values.MEMFD_BYTES:
            self.send(m.PullReply(status="ok"), [data, *buffers])
            return
        try:
            path = values.to_memfd(buffers)
        except OSError as error:
            self.send(m.PullReply(status="error", ename="OSError", evalue=f"no memory to copy the value: {error}"))
            return
        self._memfds.add(path)
        self.send(m.PullReply(status="ok", memfd=path, sizes=sizes), [data])

    def _renew(self, request: m.RenewRequest, _: object) -> None:
        try:
            attached, lost = self.group.renew(request.generation, self.shell.user_ns, attach=request.attach)
        except Exception as error:  # whatever torch raises while it connects is the answer
            reply = m.RenewReply(
                generation=request.generation, status="error", evalue=f"{type(error).__name__}: {error}"
            )
        else:
            reply = m.RenewReply(
                generation=request.generation, status="ok", attached=attached, lost=lost, steps=self.steps.count
            )
        self.send(reply)

    # ---- I/O thread

    def _send_now(self, message: m.Message, buffers: Sequence[bytes | memoryview]) -> None:
        try:
            self._dialer.send(message, buffers)
        except WireError as error:  # a display may hold anything; this thread must go on
            self._dialer.send(m.Notice(text=f"rank {self.rank}: {error}", run_id=getattr(message, "run_id", None)))

    def _io(self) -> None:
        notebook = os.pidfd_open(self.spec["notebook_pid"])
        self._dialer = Dialer(self.folder, self.spec["key"].encode(), f"{self.rank}:{os.getpid()}".encode())
        poller = Poller()
        for source in (self._dialer, self._waker.fd, notebook):
            poller.add(source)
        wait_s = _POLL_S
        while not self._leaving:
            ready = poller.wait(wait_s)
            self._waker.clear()
            if notebook in ready:
                os.killpg(0, signal.SIGKILL)
            wait_s = _STALE_POLL_S if self.streams.flush_stale() else _POLL_S
            for packet in self._dialer.receive():
                self._arrived(packet)
            telemetry = getattr(self, "telemetry", None)
            if telemetry is not None:  # first, so that a cell's metrics are there before its reply
                wait_s = min(wait_s, telemetry.pump())
            while self._outbox:
                self._send_now(*self._outbox.popleft())
        self._dialer.drain(_FLUSH_S)
        os._exit(0)

    def _arrived(self, packet: Packet) -> None:
        message = packet.message
        if isinstance(message, m.ShutdownRequest):
            self.streams.stdout.flush_all()
            self.streams.stderr.flush_all()
            self._leaving = True
        elif isinstance(message, m.InterruptRequest):
            self._to_stop = message.run_id
            if message.run_id == self._run_id:
                self._stood = self._position()
                self.steps.request_stop(message.run_id, message.at_step)
        elif isinstance(message, m.BreakRequest):
            if message.run_id in (self._run_id, self._last_run_id):
                self.group.give_up(message.reason)
        elif isinstance(message, m.WhereRequest):
            self._outbox.append((self._where(message.full), ()))
        elif isinstance(message, m.PullDone):
            if message.memfd in self._memfds:
                self._memfds.discard(message.memfd)
                values.close_memfd(message.memfd)
        else:
            self._inbox.put(packet)

    def _position(self) -> tuple[int, int] | None:
        frame = sys._current_frames().get(self._main_thread)
        return None if frame is None else (id(frame), frame.f_lasti)

    def _where(self, full: bool) -> m.WhereReply:
        from nbdist.worker.shell import describe_stack

        if self._run_id is None:
            return m.WhereReply(state="idle", since_s=self._idle_since_s, line="", steps=self.steps.count)
        waiting = self.group.waiting()
        frame = sys._current_frames().get(self._main_thread)
        line, stack = describe_stack(frame, self.shell, full)
        return m.WhereReply(
            state="waiting" if waiting else "running",
            since_s=waiting[1] if waiting else None,
            operation=waiting[0] if waiting else None,
            line=line,
            unmoved=self._stood is not None and self._stood == self._position(),
            steps=self.steps.count,
            stack=stack,
        )


def _ignore(_signum: int, _frame: types.FrameType | None) -> None:
    """SIGINT between cells."""


def _jsonable(data: Mapping[str, Any]) -> dict[str, Any]:
    """A MIME bundle with bytes as base64 text, as Jupyter's messages have it."""
    from base64 import b64encode

    return {k: b64encode(v).decode() if isinstance(v, bytes) else v for k, v in data.items()}


def _become(spec: Mapping[str, Any], stdout: int, stderr: int) -> None:
    """Turn the fork into a process of its own: session, descriptors, environment, folder, path, random state."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (stdout, 1), (stderr, 2)):
        os.dup2(source, target)
        os.close(source)
    os.environ.clear()
    os.environ.update(spec["env"])
    os.chdir(spec["cwd"])
    sys.path[:] = spec["path"]
    sys.path_importer_cache.clear()
    sys.argv = [""]
    random.seed()
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()  # each rank would draw the fork server's numbers otherwise
    time.tzset()
    name = f"nbdist rank {spec['rank']}".encode()
    ctypes.CDLL(None).prctl(15, ctypes.create_string_buffer(name[:15]), 0, 0, 0)  # PR_SET_NAME, seen in top


def run_rank(spec: Mapping[str, Any], stdout: int, stderr: int) -> None:
    """Process entry after the fork; never returns."""
    _become(spec, stdout, stderr)
    rank = Rank(spec)
    try:
        rank.start()
    except BaseException as error:
        import traceback

        lines = traceback.format_exception(error)
        rank.send(m.StartFailed(ename=type(error).__name__, evalue=str(error), traceback=lines))
        rank._leaving = True
        rank._waker.wake()
        threading.Event().wait(_FLUSH_S + 1)
        os._exit(1)
    rank.serve()
