"""KV events over ZeroMQ are numbered, can be replayed, and never block a step."""

import contextlib
import dataclasses
import logging
import threading
import time

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from paxkv.config.cache_config import CacheConfig
from paxkv.config.kv_events_config import KVEventsConfig
from paxkv.config.scheduler_config import SchedulerConfig
from paxkv.contracts.engine_request import AddRequest, UtilityCall
from paxkv.contracts.kv_cache_spec import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from paxkv.contracts.observation import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from paxkv.engine.core_thread import CoreThread
from paxkv.engine.engine_core import EngineCore
from paxkv.engine.kv_event_publisher import (
    END_OF_REPLAY,
    KVEventPublisher,
    make_kv_event_publisher,
)
from paxkv.errors import ConfigError, InvariantError
from paxkv.kv_cache.hashing.block_hash import BlockHasher, get_block_hash
from paxkv.kv_cache.observers.event_recorder import KVEventRecorder
from paxkv.kv_cache.pool.block_pool import BlockPool
from paxkv.scheduler.scheduler import Scheduler
from tests.paxkv.engine.cached_blocks import SPECS, run_request
from tests.paxkv.engine.fake_engine import FakeExecutor, make_request
from tests.paxkv.engine.kv_event_structs import (
    BATCH_TYPES,
    AllBlocksCleared016,
    Batch016,
    BlockRemoved016,
    decode,
    follow,
)

TIMEOUT_MS = 60_000


@contextlib.contextmanager
def running(**config):
    """A publisher on free loopback ports, and a context for its subscribers."""
    publisher = KVEventPublisher(
        KVEventsConfig(
            **{"endpoint": "tcp://127.0.0.1:0", "replay_endpoint": "tcp://127.0.0.1:0"} | config
        )
    )
    context = zmq.Context()
    try:
        yield publisher, context
    finally:
        publisher.close()
        context.destroy(linger=0)


def connect(context, socket_type, endpoint):
    socket = context.socket(socket_type)
    socket.set_hwm(0)
    socket.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
    if socket_type == zmq.SUB:
        socket.subscribe(b"")
    socket.connect(endpoint)
    return socket


def subscribe(publisher, context):
    """A subscriber that has received a batch, and the last number that it received."""
    socket = connect(context, zmq.SUB, publisher.endpoint)
    deadline = time.monotonic() + TIMEOUT_MS / 1000
    while time.monotonic() < deadline:
        publisher.publish(batch(-1))
        if socket.poll(20):
            break
    # Read all batches, until the last one has arrived.
    publisher.publish(batch(-2))
    payload = None
    while payload is None or msgspec.msgpack.decode(payload)[0] != -2:
        _, sequence_number, payload = socket.recv_multipart()
    return socket, int.from_bytes(sequence_number, "big")


def receive_now(socket):
    return socket.recv_multipart() if socket.poll(100) else None


def batch(ts):
    return KVEventBatch(ts=float(ts), events=[AllBlocksCleared()])


def sent_batch(ts):
    """The form in which subscribers receive `batch(ts)`."""
    return Batch016(ts=float(ts), events=[AllBlocksCleared016()], data_parallel_rank=0)


def replay(publisher, context, start, prefix=()):
    """Numbers and batches of a replay, up to its end marker."""
    socket = connect(context, zmq.DEALER, publisher.replay_endpoint)
    socket.send_multipart((*prefix, start.to_bytes(8, "big")))
    answers = []
    while True:
        *envelope, sequence_number, payload = socket.recv_multipart()
        assert envelope == list(prefix)
        if sequence_number == END_OF_REPLAY:
            assert payload == b""
            socket.close(linger=0)
            return answers
        answers.append(
            (
                int.from_bytes(sequence_number, "big"),
                decode(payload),
            )
        )


def test_message_has_topic_number_and_batch_in_the_configured_format():
    event = BlockRemoved(block_hashes=[b"12345678"], group_id=1)
    for wire_format in BATCH_TYPES:
        with running(topic="kv@1", wire_format=wire_format, data_parallel_rank=2) as (
            publisher,
            context,
        ):
            socket, last = subscribe(publisher, context)
            publisher.publish(KVEventBatch(ts=1.5, events=[event]))
            topic, sequence_number, payload = socket.recv_multipart()
        assert topic == b"kv@1"
        assert sequence_number == (last + 1).to_bytes(8, "big")
        sent = decode(payload, wire_format)
        assert (sent.ts, sent.data_parallel_rank) == (1.5, 2)
        assert sent.events[0].block_hashes == [int.from_bytes(b"12345678", "big")]
        assert getattr(sent.events[0], "group_idx", None) == (
            1 if wire_format == "vllm-0.32" else None
        )


def test_batch_without_events_for_subscribers_gets_no_number():
    stored = BlockStored(
        block_hashes=[b"h"],
        parent_block_hash=None,
        token_ids=[1, 2],
        block_size=2,
        lora_name=None,
        group_id=0,
        kind="full_attention",
        sliding_window=None,
    )
    with running() as (publisher, context):
        publisher.publish(KVEventBatch(ts=0.0, events=[stored]))
        # A second group has the hash too, which only format 0.32 reports.
        again = dataclasses.replace(stored, group_id=1)
        publisher.publish(KVEventBatch(ts=1.0, events=[again]))
        publisher.publish(batch(2))
        assert [(number, sent.ts) for number, sent in replay(publisher, context, 0)] == [
            (0, 0.0),
            (1, 2.0),
        ]


def test_batches_arrive_in_order_each_with_the_next_number():
    with running() as (publisher, context):
        socket, last = subscribe(publisher, context)
        for ts in range(200):
            publisher.publish(batch(ts))
        for ts in range(200):
            topic, sequence_number, payload = socket.recv_multipart()
            assert topic == b""
            assert int.from_bytes(sequence_number, "big") == last + 1 + ts
            assert decode(payload) == sent_batch(ts)


@pytest.mark.parametrize("prefix", [(), (b"",)])
def test_missed_batches_are_replayed_from_any_number(prefix):
    with running() as (publisher, context):
        for ts in range(5):
            publisher.publish(batch(ts))
        everything = [(ts, sent_batch(ts)) for ts in range(5)]
        for start, expected in ((0, everything), (3, everything[3:]), (5, []), (2**63, [])):
            assert replay(publisher, context, start, prefix) == expected


def test_only_the_latest_steps_are_kept_for_replay():
    with running(buffer_steps=3) as (publisher, context):
        for ts in range(10):
            publisher.publish(batch(ts))
        assert [number for number, _ in replay(publisher, context, 0)] == [7, 8, 9]


def test_replay_with_the_smallest_buffer_has_its_end_marker():
    with running(buffer_steps=1) as (publisher, context):
        for ts in range(3):
            publisher.publish(batch(ts))
            assert replay(publisher, context, 0) == [(ts, sent_batch(ts))]


def test_long_replay_is_complete_for_a_slow_reader():
    with running(buffer_steps=3000) as (publisher, context):
        for ts in range(3000):
            publisher.publish(batch(ts))
        assert len(replay(publisher, context, 0)) == 3000


def test_invalid_replay_request_is_answered_with_the_end_marker(caplog):
    with running() as (publisher, context):
        publisher.publish(batch(0))
        socket = connect(context, zmq.DEALER, publisher.replay_endpoint)
        for nonsense in (b"", b"123", b"too long a number"):
            socket.send(nonsense)
            assert socket.recv_multipart() == [END_OF_REPLAY, b""]
        assert len(replay(publisher, context, 0)) == 1
    assert "a sequence number has 8" in caplog.text


def test_events_are_published_without_a_replay_endpoint():
    with running(replay_endpoint=None) as (publisher, context):
        assert publisher.replay_endpoint is None
        socket, _ = subscribe(publisher, context)
        publisher.publish(batch(7))
        assert decode(socket.recv_multipart()[2]) == sent_batch(7)


class HeldEncoder:
    """Stops the sending thread in its first batch until it is released."""

    def __init__(self, monkeypatch):
        self.is_reached, self.go = threading.Event(), threading.Event()
        encode = msgspec.msgpack.encode

        def hold(value):
            self.is_reached.set()
            assert self.go.wait(TIMEOUT_MS / 1000)
            return encode(value)

        monkeypatch.setattr(msgspec.msgpack, "encode", hold)


def test_full_queue_drops_batches_without_blocking_and_leaves_a_gap(monkeypatch, caplog):
    held = HeldEncoder(monkeypatch)
    with running(max_queue_size=3) as (publisher, context):
        publisher.publish(batch(0))
        assert held.is_reached.wait(TIMEOUT_MS / 1000)
        for ts in range(1, 11):
            publisher.publish(batch(ts))
        assert publisher.num_dropped == 7
        held.go.set()
        # The sender had batch 0; of the batches 1 to 10, the latest three were in the queue.
        expected = [(number, sent_batch(number)) for number in (0, 8, 9, 10)]
        deadline = time.monotonic() + TIMEOUT_MS / 1000
        while replay(publisher, context, 0) != expected and time.monotonic() < deadline:
            pass
        assert replay(publisher, context, 0) == expected
        assert replay(publisher, context, 2) == expected[1:]
    # For dropped batches 1, 2 and 4 of 7.
    assert caplog.text.count("were dropped so far") == 3


def test_batches_published_before_close_arrive(monkeypatch):
    with running() as (publisher, context):
        socket, _ = subscribe(publisher, context)
        with monkeypatch.context() as patch:
            # The thread sleeps until `close` wakes it.
            patch.setattr(KVEventPublisher, "_wake", lambda self: None)
            for ts in range(100):
                publisher.publish(batch(ts))
        publisher.close()
        received = [decode(socket.recv_multipart()[2]) for _ in range(100)]
    assert received == [sent_batch(ts) for ts in range(100)]


def test_close_ends_the_thread_and_frees_the_ports():
    publisher = KVEventPublisher(
        KVEventsConfig(endpoint="tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0")
    )
    endpoint, replay_endpoint = publisher.endpoint, publisher.replay_endpoint
    publisher.close()
    publisher.close()
    assert "paxkv-kv-events" not in [thread.name for thread in threading.enumerate()]
    with pytest.raises(InvariantError, match="after close"):
        publisher.publish(batch(0))
    with running(endpoint=endpoint, replay_endpoint=replay_endpoint) as (again, context):
        again.publish(batch(1))
        assert replay(again, context, 0) == [(0, sent_batch(1))]


@pytest.mark.parametrize("name", ["endpoint", "replay_endpoint"])
def test_error_names_an_endpoint_that_cannot_be_bound(name):
    with running() as (publisher, _):
        # 192.0.2.1 is reserved for documentation, so it is no address of this machine.
        for endpoint in (publisher.endpoint, "tcp://192.0.2.1:5557", "ipc:///missing/folder/s"):
            with pytest.raises(ConfigError, match="cannot be bound") as error:
                with running(**{name: endpoint}):
                    pass
            assert f"{name}={endpoint!r}" in str(error.value)


def test_log_contains_the_ports_that_the_system_chose(caplog):
    caplog.set_level(logging.INFO, logger="paxkv")
    with running() as (publisher, _):
        assert publisher.endpoint in caplog.text and publisher.replay_endpoint in caplog.text


def test_without_a_config_there_is_no_publisher():
    assert make_kv_event_publisher(None) is None


@settings(max_examples=5)
@given(
    steps=st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=2, max_size=10), st.booleans()),
        min_size=5,
        max_size=20,
    ),
    first_heard=st.integers(0, 10),
)
def test_a_late_subscriber_rebuilds_the_cache_by_replay(steps, first_heard):
    """It misses the first batches and gets them only by replay."""
    recorder = KVEventRecorder(SPECS)
    pool = BlockPool(num_blocks=8, enable_caching=True, hash_block_size=2, observers=[recorder])
    hasher = BlockHasher(block_size=2, seed="s")
    with running() as (publisher, context):
        heard, num_batches = {}, 0
        for step, (token_ids, is_reset) in enumerate(steps):
            run_request(pool, hasher, token_ids)
            if is_reset:
                pool.reset_prefix_cache()
            events = recorder.drain()
            if events:
                publisher.publish(KVEventBatch(ts=0.0, events=events))
                num_batches += 1
            if step == first_heard:
                heard |= dict(replay(publisher, context, max(num_batches - 1, 0)))
        heard |= dict(replay(publisher, context, max(heard, default=-1) + 1))
        missing = sorted(set(range(num_batches)) - set(heard))
        if missing:
            heard |= dict(replay(publisher, context, missing[0]))
    assert sorted(heard) == list(range(num_batches))
    known = set()
    for number in sorted(heard):
        follow(known, heard[number])
    assert known == findable(pool)


def findable(pool):
    keys = [get_block_hash(key) for key, _ in pool.cached_block_hash_to_block.items()]
    return {(None, int.from_bytes(key[-8:], "big")) for key in keys}


def make_core(publisher):
    """An engine over the real scheduler with 15 blocks of 8 tokens, whose events are published."""
    spec = FullAttentionSpec(block_size=8, num_kv_heads=1, head_size=8, dtype="float32")
    kv_cache_config = KVCacheConfig(
        num_blocks=16,
        kv_cache_groups=(KVCacheGroupSpec(layer_names=("layers.0",), kv_cache_spec=spec),),
    )
    scheduler = Scheduler(
        scheduler_config=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
        cache_config=CacheConfig(block_size=8, kv_events_config="{}"),
        kv_cache_config=kv_cache_config,
        max_model_len=64,
    )
    executor = FakeExecutor(kv_cache_config, fails_at_step=None)
    return EngineCore(scheduler, executor, publisher), scheduler.kv_cache_manager.block_pool


def test_an_engine_publishes_what_its_steps_and_resets_change():
    with running() as (publisher, context):
        core, pool = make_core(publisher)
        for number in range(8):  # 8 * 3 full blocks are more than the pool has
            prompt = [number * 100 + position for position in range(25)]
            core.handle(AddRequest(request=make_request(f"r{number}", prompt, max_tokens=2)))
        while core.has_work:
            core.step()
        batches = replay(publisher, context, 0)
        known = set()
        for _, step_batch in batches:
            follow(known, step_batch)
        events = [event for _, step_batch in batches for event in step_batch.events]
        assert any(isinstance(event, BlockRemoved016) for event in events)
        assert known == findable(pool)
        assert all(batch.events for _, batch in batches)
        # An idle engine's reset does not wait for the next step.
        core.handle(UtilityCall(call_id=1, method="reset_prefix_cache"))
        (_, last) = replay(publisher, context, len(batches))[0]
        assert last.events == [AllBlocksCleared016()]
        assert abs(last.ts - time.time()) < 60


def test_the_publisher_ends_with_its_engine():
    with running() as (publisher, _):
        core, _ = make_core(publisher)
        thread = CoreThread(core)
        thread.close()
        with pytest.raises(InvariantError, match="after close"):
            publisher.publish(batch(0))
