"""Messages between the processes of an engine."""

import numpy as np
import pytest

from paxkv.runner.ranks import rank_message
from paxkv.runner.ranks.rank_message import (
    Call,
    End,
    HostArray,
    Join,
    RankMessageError,
    Value,
    Values,
    decode,
    encode,
)

ARRAY_NP = np.arange(-3, 9, dtype=np.int32).reshape(3, 4)
CALL = Call("run_burst", 7, HostArray.of(ARRAY_NP), True)


@pytest.mark.parametrize(
    "body", [CALL, Call("draw"), Join(1), Value("kernels", "xla"), Values("blocks", (3, 4)), End()]
)
def test_message_is_what_was_sent(body: rank_message.Body) -> None:
    assert decode(encode(5, body), number=5, sender="the leader") == body


def test_array_keeps_its_numbers_and_dimensions() -> None:
    call = decode(encode(0, CALL), number=0, sender="the leader")
    np.testing.assert_array_equal(call.array.array_np, ARRAY_NP)


def test_other_numbers_are_rejected_at_the_sender() -> None:
    with pytest.raises(TypeError, match="int32, got int64"):
        HostArray.of(ARRAY_NP.astype(np.int64))


def test_every_damaged_byte_is_noticed() -> None:
    message = encode(3, CALL)
    for idx in range(len(message)):
        damaged = bytearray(message)
        damaged[idx] ^= 4
        with pytest.raises(RankMessageError, match="message 3 from the leader"):
            decode(bytes(damaged), number=3, sender="the leader")
    for length in range(len(message)):
        with pytest.raises(RankMessageError):
            decode(message[:length], number=3, sender="the leader")


@pytest.mark.parametrize("number", [2, 4])
def test_lost_or_repeated_message_is_noticed(number: int) -> None:
    with pytest.raises(RankMessageError, match=f"expected message 3 .*got message {number}"):
        decode(encode(number, CALL), number=3, sender="the leader")


def test_other_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    message = encode(0, CALL)
    monkeypatch.setattr(rank_message, "VERSION", 3)
    with pytest.raises(RankMessageError, match="version 2; this process has version 3"):
        decode(message, number=0, sender="the leader")
