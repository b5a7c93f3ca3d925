"""`KVEventPublisher`: sends numbered KV cache events over ZeroMQ, and replays missed ones."""

import logging
import os
import threading
from collections import deque

import msgspec
import zmq

from paxkv.config.kv_events_config import KVEventsConfig
from paxkv.contracts.observation import KVEventBatch
from paxkv.engine.kv_event_formats import WireBatch, WireFormat
from paxkv.errors import ConfigError, InvariantError

logger = logging.getLogger(__name__)

# This sequence number, with an empty payload, ends a replay.
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
# When the engine ends, it waits this long for subscribers to receive the last batches.
_LINGER_MS = 1000
_MAX_HWM = 2**31 - 1


class KVEventPublisher:
    """Publishes on a PUB socket, and answers requests for missed batches on a ROUTER socket.

        message          (topic, sequence number, msgpack of WireBatch)
        replay, request  (sequence number to start from)
        replay, answer   (sequence number, msgpack) for each stored batch from there on,
                         then (-1, empty)

    All methods are called from the engine's thread.

    Sequence numbers have 8 bytes, big-endian. They start at 0 and grow by one per batch. A dropped
    batch keeps its number, so subscribers see the gap. If a replay does not fill the gap, a
    subscriber must forget all that it knows of this engine's cache. (vLLM waits for room in the
    queue instead. In paxkv, subscribers cannot slow a step down.)

    A client requests a replay with a DEALER socket. Frames before the number, such as an empty
    frame, are sent back before each answer.

    Attributes:
        num_dropped: Batches that were dropped because more than `max_queue_size` waited.

    Raises:
        ConfigError: An endpoint cannot be bound.

    Source: vLLM `distributed/kv_events.py`.
    """

    def __init__(self, config: KVEventsConfig) -> None:
        self._max_queue_size = config.max_queue_size
        self._next_sequence_number = 0
        self.num_dropped = 0
        self._queue: deque[tuple[int, WireBatch]] = deque()
        self._wire_format = WireFormat(config)
        self._is_closing = threading.Event()
        sender = _Sender(config, self._queue, self._is_closing)
        self.endpoint = sender.endpoint
        self.replay_endpoint = sender.replay_endpoint
        self._wake_fd = sender.wake_fd
        # If the settings have port 0, only this log line shows the port that was chosen.
        replay = self.replay_endpoint or "nowhere"
        logger.info("KV cache events: published at %s, replayed at %s", self.endpoint, replay)
        # From here on, only the thread uses the sockets.
        self._thread = threading.Thread(target=sender.run, name="paxkv-kv-events", daemon=True)
        self._thread.start()

    def publish(self, batch: KVEventBatch) -> None:
        """Queues the events of one step. Never waits: a full queue drops its oldest batch.

        Raises:
            InvariantError: The publisher is closed.
        """
        if self._is_closing.is_set():
            raise InvariantError("events were published after close().")
        wire_batch = self._wire_format.convert(batch)
        if wire_batch is None:
            return
        # The batch gets its number before it may be dropped.
        self._queue.append((self._next_sequence_number, wire_batch))
        self._next_sequence_number += 1
        if len(self._queue) > self._max_queue_size:
            self._drop_oldest()
        self._wake()

    def close(self) -> None:
        """Sends all queued batches and ends the thread, in about a second. May be repeated."""
        if self._is_closing.is_set():
            return
        self._is_closing.set()
        self._wake()
        self._thread.join()
        os.close(self._wake_fd)

    def _wake(self) -> None:
        try:
            os.write(self._wake_fd, b"\0")
        except (BlockingIOError, BrokenPipeError):
            # The pipe is full because the thread has not read earlier bytes: it will wake. Or the
            # thread has died, which was logged and is no reason to end the engine.
            return

    def _drop_oldest(self) -> None:
        try:
            self._queue.popleft()
        except IndexError:
            # The thread has sent all batches meanwhile.
            return
        self.num_dropped += 1
        # Logs the numbers 1, 2, 4, 8, ... only, so that the log does not fill up.
        if self.num_dropped & (self.num_dropped - 1) == 0:
            logger.warning(
                "%d KV event batches were dropped so far: more than max_queue_size=%d waited.",
                self.num_dropped,
                self._max_queue_size,
            )


class _Sender:
    """The part that runs in the thread: the sockets, and the batches stored for replay."""

    def __init__(
        self,
        config: KVEventsConfig,
        queue: deque[tuple[int, WireBatch]],
        is_closing: threading.Event,
    ) -> None:
        self._queue = queue
        self._is_closing = is_closing
        self._topic = config.topic.encode()
        # Sequence number and payload, oldest first.
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._router: zmq.Socket | None = None
        self._context = zmq.Context()
        try:
            self._pub = self._bind(zmq.PUB, "endpoint", config.endpoint, config.hwm)
            if config.replay_endpoint is not None:
                # ZeroMQ drops messages above this mark, even the end of a replay. Two whole replays
                # fit: one that the client still reads, and the next one.
                hwm = min(2 * (config.buffer_steps + 1), _MAX_HWM)
                self._router = self._bind(
                    zmq.ROUTER, "replay_endpoint", config.replay_endpoint, hwm
                )
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self.endpoint = _last_endpoint(self._pub)
        self.replay_endpoint = None if self._router is None else _last_endpoint(self._router)
        # `publish` writes to this pipe to wake the thread from its poll. ZeroMQ's sockets must not
        # be shared between threads.
        self._woken_fd, self.wake_fd = os.pipe()
        os.set_blocking(self.wake_fd, False)

    def run(self) -> None:
        """Runs in the thread until the publisher is closed."""
        poller = zmq.Poller()
        poller.register(self._woken_fd, zmq.POLLIN)
        if self._router is not None:
            poller.register(self._router, zmq.POLLIN)
        try:
            is_last = False
            while not is_last:
                ready = dict(poller.poll())
                if self._woken_fd in ready:
                    os.read(self._woken_fd, 65_536)
                # Read before the queue is emptied, so batches from before `close` are all sent.
                is_last = self._is_closing.is_set()
                self._send_queued()
                if self._router in ready:
                    self._answer_replay(self._router)
        finally:
            self._context.destroy(linger=_LINGER_MS)
            os.close(self._woken_fd)

    def _send_queued(self) -> None:
        while self._queue:
            try:
                number, batch = self._queue.popleft()
            except IndexError:
                # `publish` has dropped the last batch meanwhile.
                return
            sequence_number = number.to_bytes(8, "big")
            payload = msgspec.msgpack.encode(batch)
            self._sent.append((sequence_number, payload))
            # Never blocks: a PUB socket drops messages for which a slow subscriber has no room.
            self._pub.send_multipart((self._topic, sequence_number, payload))

    def _answer_replay(self, router: zmq.Socket) -> None:
        # The envelope names the client. It must precede every answer.
        *envelope, start = router.recv_multipart()
        if len(start) == len(END_OF_REPLAY):
            for sequence_number, payload in self._sent:
                # Big-endian bytes of equal length sort like their numbers.
                if sequence_number >= start:
                    router.send_multipart((*envelope, sequence_number, payload))
        else:
            logger.warning("a replay request has %d bytes; a sequence number has 8.", len(start))
        router.send_multipart((*envelope, END_OF_REPLAY, b""))

    def _bind(self, socket_type: int, name: str, endpoint: str, hwm: int) -> zmq.Socket:
        socket = self._context.socket(socket_type)
        socket.set_hwm(hwm)
        if "[" in endpoint:
            socket.setsockopt(zmq.IPV6, 1)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"kv_events_config: {name}={endpoint!r} cannot be bound: {error.strerror}. "
                "Choose a free port and an address of this machine."
            ) from error
        return socket


def make_kv_event_publisher(config: KVEventsConfig | None) -> KVEventPublisher | None:
    """Makes the publisher of `CacheConfig.kv_events`; None without a config.

    Raises:
        ConfigError: An endpoint cannot be bound.
    """
    return None if config is None else KVEventPublisher(config)


def _last_endpoint(socket: zmq.Socket) -> str:
    """Returns the endpoint of a bound socket. It has the port that was chosen for port 0."""
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)
