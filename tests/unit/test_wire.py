"""The wire: every message survives it, and nothing else gets through."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import pickle
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
import zmq
from deadlines import wait_until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jupyter_client.session import Session

from nbdist.errors import WireError
from nbdist.notebook.launch import runtime_folder
from nbdist.wire import channel, messages
from nbdist.wire.channel import Dialer, Listener, Poller, Waker, new_key
from nbdist.wire.messages import FROM_RANK, TO_RANK, ExecuteRequest, Message, Notice, Ready

_libc = ctypes.CDLL(None)
_libc.getenv.restype = ctypes.c_char_p
ALL = [*TO_RANK.values(), *FROM_RANK.values()]
FUZZ = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


class Wire:
    """Both ends, and a stranger who can dial but does not know the key."""

    def __init__(self) -> None:
        self.folder = runtime_folder()
        self.key = new_key()
        self.notebook = Listener(self.folder, self.key)
        self.rank = Dialer(self.folder, self.key, b"0:1")
        self.context = zmq.Context()
        self.stranger = self.context.socket(zmq.DEALER)
        self.stranger.setsockopt(zmq.LINGER, 0)
        self.stranger.connect(f"ipc://{self.folder / 'wire'}")

    def arrived(self, end: Listener | Dialer, what: int = 1, dropped: int = 0) -> list[channel.Packet]:
        """Wait until so many messages have been taken and so many dropped."""
        found: list[channel.Packet] = []

        def enough() -> bool:
            found.extend(end.receive())
            return len(found) >= what and end.dropped >= dropped

        wait_until(enough, what="messages")
        assert (len(found), end.dropped) == (what, dropped)
        return found

    def close(self) -> None:
        self.stranger.close()
        self.context.term()
        self.rank.close()
        self.notebook.close()
        shutil.rmtree(self.folder)


@pytest.fixture
def wire() -> Iterator[Wire]:
    made = Wire()
    yield made
    made.close()


@pytest.fixture(scope="module")
def shared_wire() -> Iterator[Wire]:
    """For examples by the dozen; none of them may harm it."""
    made = Wire()
    yield made
    made.close()


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Values that fit a field."""
    json_values = st.recursive(
        st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=5,
    )
    if hint is Any:
        return json_values
    origin, args = get_origin(hint), get_args(hint)
    if origin is list:
        return st.lists(values_of(args[0]), max_size=4)
    if origin is dict:
        return st.dictionaries(st.text(), values_of(args[1]), max_size=4)
    if origin is not None:
        return st.one_of(*(values_of(a) for a in args))
    return {
        str: st.text(),
        int: st.integers(-(2**60), 2**60),
        float: st.floats(allow_nan=False),
        bool: st.booleans(),
        type(None): st.none(),
    }[hint]


def messages_of(kind: type[Message]) -> st.SearchStrategy[Message]:
    fields = {name: values_of(hint) for name, hint in messages._HINTS[kind].items()}
    return st.builds(kind, **fields)


def plainest(kind: type[Message]) -> Message:
    """A message with its required fields only."""
    simple = {"str": "x", "int": 1, "float": 1.0, "list[str]": ["x"], "list[int]": [0], "dict[str, Any]": {"a": 1}}
    simple |= {"list[dict[str, Any]]": [{"name": "loss", "n": 1}], "str | None": None, "float | None": None}
    required = messages._REQUIRED[kind]
    return kind(**{f.name: simple[str(f.type)] for f in dataclasses.fields(kind) if f.name in required})


def content_of(message: Message) -> dict[str, Any]:
    return dataclasses.asdict(message)


# ---- what may pass


def test_every_kind_has_one_direction_and_one_name():
    assert not TO_RANK.keys() & FROM_RANK.keys()
    defined = {c.kind for c in Message.__subclasses__()}
    assert defined == TO_RANK.keys() | FROM_RANK.keys()
    assert all(c.kind and c.__doc__ for c in ALL)


@pytest.mark.parametrize("kind", ALL, ids=lambda c: c.kind)
def test_every_message_comes_back_as_it_was(kind, shared_wire):
    @settings(FUZZ, max_examples=8)
    @given(message=messages_of(kind), parts=st.lists(st.binary(max_size=100), max_size=3))
    def there_and_back(message: Message, parts: list[bytes]) -> None:
        wire, dropped = shared_wire, (shared_wire.rank.dropped, shared_wire.notebook.dropped)
        if kind.kind in TO_RANK:
            wire.notebook.send([b"0:1"], message, parts)
            (packet,) = wire.arrived(wire.rank, dropped=dropped[0])
            assert packet.sender == b""
        else:
            wire.rank.send(message, parts)
            (packet,) = wire.arrived(wire.notebook, dropped=dropped[1])
            assert packet.sender == b"0:1"
        assert packet.message == message
        assert [bytes(b) for b in packet.buffers] == parts

    if kind.kind in TO_RANK:  # a ROUTER knows a peer once it has heard of it
        shared_wire.rank.send(Notice(text="here"))
        shared_wire.arrived(shared_wire.notebook, dropped=shared_wire.notebook.dropped)
    there_and_back()


def test_order_and_large_buffers(wire):
    for number in range(50):
        wire.rank.send(Notice(text=str(number)), [bytes([number]) * (number * 10_000)])
    packets = wire.arrived(wire.notebook, 50)
    assert [p.message.text for p in packets] == [str(n) for n in range(50)]
    assert all(bytes(p.buffers[0]) == bytes([n]) * (n * 10_000) for n, p in enumerate(packets))


def test_values_that_json_does_not_know_arrive_as_what_is_nearest(wire):
    import numpy as np

    class Odd:
        def __str__(self) -> str:
            return "odd"

    wire.rank.send(Notice(text="lone \ud800 surrogate, \udc80 byte, \x00"))
    data = {"a": np.float32(0.5), "b": np.arange(3), "c": Odd(), "d": {(1, 2): "gone", 3: "kept"}, "e": float("inf")}
    wire.rank.send(messages.Sample(run_id=None, time_s=1.0, values=data))
    text, sample = (p.message for p in wire.arrived(wire.notebook, 2))
    assert text.text == "lone ? surrogate, ? byte, \x00"
    assert sample.values == {"a": 0.5, "b": [0, 1, 2], "c": "odd", "d": {"3": "kept"}, "e": float("inf")}


def test_what_cannot_be_sent_is_refused_by_the_sender(wire, monkeypatch):
    endless: dict[str, Any] = {}
    endless["again"] = endless
    with pytest.raises(WireError, match="sample cannot be written as JSON"):
        wire.rank.send(messages.Sample(run_id=None, time_s=1.0, values=endless))
    monkeypatch.setattr(channel, "MAX_JSON_BYTES", 1000)
    with pytest.raises(WireError, match=r"notice has 1,\d\d\d bytes, more than the 1,000 allowed"):
        wire.rank.send(Notice(text="x" * 1000))
    wire.rank.send(Notice(text="small"))
    (packet,) = wire.arrived(wire.notebook)
    assert packet.message.text == "small"


# ---- what may not


class Bomb:
    """Does something when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str, str]]:
        return os.putenv, ("NBDIST_BOMB", "went off")

    @staticmethod
    def went_off() -> bool:
        return _libc.getenv(b"NBDIST_BOMB") is not None


def frames(key: bytes, kind: str, content: Any, parts: tuple[bytes, ...] = ()) -> list[bytes]:
    session = Session(key=key)
    return [*session.serialize(session.msg(kind, json.dumps(content).encode())), *parts]


def notice(key: bytes) -> list[bytes]:
    return frames(key, "notice", {"text": "forged"}, (pickle.dumps(Bomb()),))


def edited(parts: list[bytes], index: int, old: bytes, new: bytes) -> list[bytes]:
    assert old in parts[index]
    return [p.replace(old, new) if i == index else p for i, p in enumerate(parts)]


FORGERIES: dict[str, Callable[[bytes], list[bytes]]] = {
    "a key of its own": lambda key: notice(b"guess"),
    "no signature": lambda key: edited(good := notice(key), 1, good[1], b""),
    "a changed content": lambda key: edited(notice(key), 5, b"forged", b"FORGED"),
    "a changed header": lambda key: edited(notice(key), 2, b'"notice"', b'"sample"'),
    "no delimiter": lambda key: notice(key)[1:],
    "only a delimiter": lambda key: [b"<IDS|MSG>"],
    "too few frames": lambda key: notice(key)[:4],
    "garbage": lambda key: [os.urandom(100) for _ in range(7)],
    "nothing": lambda key: [b""],
    "a bare pickle": lambda key: [pickle.dumps(Bomb())],
    "too many frames": lambda key: [*notice(key), *[b""] * 2000],
}

MISFITS: dict[str, tuple[str, Any]] = {
    "an unknown kind": ("format_disk", {}),
    "a kind of the other direction": ("execute_request", content_of(plainest(ExecuteRequest))),
    "an empty kind": ("", {}),
    "a missing field": ("notice", {}),
    "an unknown field": ("notice", {"text": "", "more": 1}),
    "a field that is a constant of the class": ("notice", {"text": "", "kind": "sample"}),
    "a number for a text": ("notice", {"text": 1}),
    "a list for a text": ("notice", {"text": ["a"]}),
    "a truth for a number": ("ready", content_of(plainest(Ready)) | {"pid": True}),
    "a fraction for a number": ("ready", content_of(plainest(Ready)) | {"pid": 0.5}),
    "none for a text": ("notice", {"text": None}),
    "a text in a list of objects": ("metrics", {"run_id": "", "seq": 0, "series": ["loss"]}),
    "a number in a list of texts": ("start_failed", {"ename": "", "evalue": "", "traceback": [1]}),
    "a list for the content": ("notice", ["text"]),
    "a text for the content": ("notice", "text"),
    "none for the content": ("shutdown_request", None),
}


def nothing_came_but_a_later_message(wire: Wire, dropped: int = 1) -> None:
    wire.rank.send(Notice(text="good"))
    (packet,) = wire.arrived(wire.notebook, 1, dropped)
    assert packet.message.text == "good"
    assert packet.sender == b"0:1"
    assert not Bomb.went_off()


@pytest.mark.parametrize("how", FORGERIES)
def test_what_is_not_signed_is_dropped_and_counted(how, wire):
    wire.stranger.send_multipart(FORGERIES[how](wire.key))
    nothing_came_but_a_later_message(wire)


@pytest.mark.parametrize("how", MISFITS)
def test_what_is_signed_but_no_message_is_dropped_and_counted(how, wire):
    wire.stranger.send_multipart(frames(wire.key, *MISFITS[how], (pickle.dumps(Bomb()),)))
    nothing_came_but_a_later_message(wire)


def test_a_message_is_taken_once(wire):
    once = frames(wire.key, "notice", {"text": "good"})
    for _ in range(3):
        wire.stranger.send_multipart(once)
    wire.arrived(wire.notebook, 1, dropped=2)


def test_an_oversized_message_is_dropped_before_it_is_read(wire, monkeypatch):
    monkeypatch.setattr(channel, "MAX_JSON_BYTES", 10_000)
    monkeypatch.setattr(Session, "deserialize", lambda *_, **__: pytest.fail("it was read"))
    wire.stranger.send_multipart(frames(wire.key, "notice", {"text": "x" * 10_000}))
    wait_until(lambda: wire.notebook.receive() or wire.notebook.dropped == 1)


def test_ranks_drop_what_only_ranks_say(wire):
    wire.rank.send(Notice(text="here"))
    wire.arrived(wire.notebook)
    with_key = frames(wire.key, "notice", {"text": "not for ranks"})
    wire.notebook._socket.send_multipart([b"0:1", *with_key])
    wire.notebook._socket.send_multipart([b"0:1", *frames(b"guess", "shutdown_request", {})])
    wire.notebook.send([b"0:1"], messages.WhereRequest())
    (packet,) = wire.arrived(wire.rank, 1, dropped=2)
    assert packet.message == messages.WhereRequest()


def test_a_rank_that_is_gone_costs_nothing(wire):
    wire.notebook.send([b"7:1"], messages.WhereRequest())
    nothing_came_but_a_later_message(wire, dropped=0)


@FUZZ
@given(parts=st.lists(st.binary(max_size=300) | st.just(b"<IDS|MSG>"), min_size=1, max_size=9))
def test_arbitrary_bytes_never_become_a_message(parts, shared_wire):
    before = shared_wire.notebook.dropped
    shared_wire.stranger.send_multipart(parts)
    wait_until(lambda: shared_wire.notebook.receive() or shared_wire.notebook.dropped == before + 1)
    assert shared_wire.notebook.dropped == before + 1


@settings(FUZZ, max_examples=25)
@given(data=st.data())
def test_arbitrary_content_either_fits_or_is_refused(data):
    kind = data.draw(st.sampled_from(ALL))
    names = [*messages._HINTS[kind], "kind", "more"]
    content = data.draw(st.dictionaries(st.sampled_from(names), values_of(Any), max_size=8) | values_of(Any))
    try:
        message = messages.parse(kind.kind, content, TO_RANK | FROM_RANK)
    except WireError:
        return
    for name, hint in messages._HINTS[kind].items():
        assert messages._fits(getattr(message, name), hint)


# ---- the folder and the ends


def test_the_folder_is_private():
    folder = runtime_folder()
    try:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert folder.stat().st_uid == os.getuid()
    finally:
        folder.rmdir()


def test_a_path_too_long_for_a_socket_is_refused(tmp_path):
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    with pytest.raises(WireError, match="the path of a unix socket may have 100 bytes"):
        Listener(folder, new_key())


@pytest.mark.parametrize("variable", ["XDG_RUNTIME_DIR", "TMPDIR"])
def test_a_long_or_missing_runtime_folder_is_passed_over(variable, tmp_path, monkeypatch):
    import tempfile

    long = tmp_path / ("y" * 80)
    long.mkdir()
    for path in (long, Path("/nowhere"), Path("")):
        monkeypatch.setenv(variable, str(path))
        monkeypatch.setattr(tempfile, "tempdir", None)
        folder = runtime_folder()
        folder.rmdir()
        assert len(os.fsencode(folder / "wire")) <= 100


def test_the_bomb_would_go_off():
    loaded = pickle.dumps(Bomb())
    assert not Bomb.went_off()
    pickle.loads(loaded)
    assert Bomb.went_off()
    os.unsetenv("NBDIST_BOMB")


def test_a_channel_needs_a_key():
    folder = runtime_folder()
    try:
        with pytest.raises(WireError, match="needs a signing key"):
            Listener(folder, b"")
    finally:
        shutil.rmtree(folder)


def test_keys_differ():
    assert len({new_key() for _ in range(100)}) == 100
    assert all(len(new_key()) == 64 for _ in range(3))


def test_draining_lets_what_was_sent_go(wire):
    for number in range(100):
        wire.rank.send(Notice(text=str(number)))
    wire.rank.drain(5)
    assert len(wire.arrived(wire.notebook, 100)) == 100


def test_another_thread_wakes_the_one_that_polls():
    waker, poller = Waker(), Poller()
    poller.add(waker.fd)
    assert poller.wait(0) == set()
    thread = threading.Thread(target=lambda: [waker.wake() for _ in range(1000)])
    thread.start()
    assert poller.wait(60) == {waker.fd}
    thread.join()
    waker.clear()
    waker.clear()
    assert poller.wait(0) == set()
    poller.remove(waker.fd)
    waker.close()
    waker.wake()


def test_an_ended_descriptor_is_told_as_one_that_can_be_read():
    read, write = os.pipe()
    poller = Poller()
    poller.add(read)
    os.close(write)
    assert poller.wait(60) == {read}
    os.close(read)
