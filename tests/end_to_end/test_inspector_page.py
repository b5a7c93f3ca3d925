"""The inspector's page in a real browser: what it shows is what the engine does.

Needs `pip install -e '.[browser]'` and a Chromium or Chrome in PATH, and is skipped without them.
"""

import random
import shutil
import time

import pytest

from paxkv.config.server_config import ServerConfig
from tests.paxkv.inspector.inspected_server import Traffic, make_client, run_server
from tests.paxkv.inspector.recorded_trace import record

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="needs playwright for Python: pip install -e '.[browser]'"
)
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))),
    None,
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium or Chrome in PATH")

ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
MAX_FRAME_MS = 50
# Of the page's own state, in the form of `truth`.
READ_STATE = """() => {
  const s = globalThis.inspector.live.head;
  const tables = {};
  for (const [key, groups] of s.tables) tables[s.name(key)] = groups.map((t) => [...t.ids]);
  return {refs: [...s.refs], cached: [...s.hash].map((h) => h !== 0), tables,
          running: s.running.map((r) => s.name(r.key))};
}"""
# The time between frames is also that of whatever else the machine does; a frame's work is ours.
TIME_WORK = """
  const ask = window.requestAnimationFrame.bind(window);
  window.frameWork = [];
  window.requestAnimationFrame = (callback) => ask((now) => {
    const start = performance.now();
    callback(now);
    window.frameWork.push(performance.now() - start);
  });
"""
MEASURE_FRAMES = """(seconds) => new Promise((done) => {
  const between = [];
  window.frameWork.length = 0;
  let last = performance.now();
  const end = last + 1000 * seconds;
  const tick = () => {
    const now = performance.now();
    between.push(now - last);
    last = now;
    if (now < end) requestAnimationFrame(tick);
    else done({between: between.slice(1), work: window.frameWork.slice()});
  };
  requestAnimationFrame(tick);
})"""

# Where each section begins on the page, once two frames in a row show the same.
SETTLED_TOPS = """() => new Promise((done) => {
  let last = "";
  const look = () => {
    const sections = [...document.querySelectorAll("section")];
    const tops = sections.map((s) => s.getBoundingClientRect().top + scrollY);
    const now = JSON.stringify(tops);
    if (now === last) done(tops);
    else {
      last = now;
      requestAnimationFrame(look);
    }
  };
  requestAnimationFrame(look);
})"""


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def complaints():
    return []


@pytest.fixture
def open_page(browser, complaints):
    """Opens pages, and fails the test for whatever one of them complains of."""
    contexts = []

    def open_page(url, **options):
        contexts.append(
            browser.new_context(**({"viewport": {"width": 1600, "height": 1000}} | options))
        )
        contexts[-1].add_init_script(TIME_WORK)
        page = contexts[-1].new_page()
        page.set_default_timeout(60_000)
        page.on("console", lambda m: m.type in ("error", "warning") and complaints.append(m.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(f"{url}/inspector")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


def serve(engine, **config):
    return run_server(engine, ServerConfig(port=0, **config), starts=True)


def percentiles(times):
    times = sorted(times)
    return {f"p{share}": round(times[len(times) * share // 100], 1) for share in (50, 99)}


def number(page, selector):
    return int("".join(c for c in page.inner_text(selector) if c.isdigit()) or 0)


def wait_until(claim, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not claim():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.05)


def test_page_follows_preemption_and_eviction_and_steps_back(open_page):
    engine = make_client(num_blocks=96, step_s=0.01, max_num_seqs=4)
    with serve(engine, inspector_show_text=True) as (url, loop):
        page = open_page(url)
        page.wait_for_selector("#status[data-kind=live]")
        # The figures come with the first frame, a moment after the stream is open.
        wait_until(lambda: page.inner_text("#kpi-running") == "0")
        assert page.is_visible("#running-empty")
        traffic = Traffic(engine, loop)
        for name in ("first", "second", "third"):
            traffic.send(f"<b>{name}</b> prompt of its own", 130)
        page.wait_for_selector("#running .request")
        wait_until(lambda: number(page, "#kpi-preemptions") > 0)
        wait_until(lambda: number(page, "#kpi-evictions") > 0)
        page.wait_for_selector("#log .event[data-kind=preempted]")
        page.wait_for_selector("#log .event[data-kind=evicted]")

        # A block says what is in it, as text and not as markup.
        for _ in range(2):
            page.focus("#map")
            page.keyboard.press("Home")
            page.keyboard.press("ArrowRight")
        page.wait_for_selector("#details .tokens span")
        assert "#1" in page.inner_text("#details") and page.query_selector("#details b") is None

        page.keyboard.press("Escape")
        page.click("#pause")
        page.wait_for_selector("#status[data-kind=paused]")
        at = page.evaluate("inspector.viewIndex()")
        now = page.evaluate("inspector.state.at")
        page.click("#back")
        page.click("#back")
        assert page.evaluate("inspector.viewIndex()") == at - 2
        assert page.evaluate("inspector.state.at") < now
        # Going back and forth shows the same moment again.
        shown = page.evaluate("[...inspector.state.refs]")
        page.click("#forward")
        page.click("#back")
        assert page.evaluate("[...inspector.state.refs]") == shown
        page.click("#live")
        page.wait_for_selector("#status[data-kind=live]")

        wait_until(lambda: traffic.is_over, 120.0)
        assert not traffic.failures
        wait_until(lambda: page.inner_text("#kpi-running") == "0")
        state = page.evaluate(READ_STATE)
        assert sum(state["refs"]) == 0 and state["tables"] == {} and any(state["cached"])


@pytest.mark.slow  # python -m pytest -m slow tests/end_to_end/test_inspector_page.py -s
def test_hundred_thousand_blocks_stay_under_50_ms_a_frame(open_page):
    engine = make_client(
        num_blocks=100_000, step_s=0.01, max_num_seqs=64, max_num_batched_tokens=4096
    )
    rng = random.Random(1)
    with serve(engine) as (url, loop):
        page = open_page(url)
        page.wait_for_selector("#status[data-kind=live]")
        traffic = Traffic(engine, loop)
        for _ in range(600):
            text = "".join(chr(rng.randint(32, 126)) for _ in range(rng.randint(200, 1800)))
            traffic.send(text, rng.randint(50, 200))
        page.wait_for_selector("#running .request")
        for mode in ("state", "request", "age"):
            page.check(f"input[name=mode][value={mode}]", force=True)
            box = page.locator("#map").bounding_box()
            page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
            measured = page.evaluate(MEASURE_FRAMES, 4)
            between, work = percentiles(measured["between"]), percentiles(measured["work"])
            print(f"{mode}: ms between frames {between}, ms of work in a frame {work}")
            assert len(measured["between"]) > 20
            assert between["p50"] < MAX_FRAME_MS and work["p99"] < MAX_FRAME_MS
        assert page.evaluate("inspector.live.head.running.length") > 32 and not traffic.failures
        page.close()


@pytest.mark.slow  # as above
def test_page_equals_the_engine_when_traffic_has_settled(open_page):
    engine = make_client(num_blocks=200, step_s=0.004, max_num_seqs=6, with_window=True)
    rng = random.Random(2)
    with serve(engine) as (url, loop):
        page = open_page(url)
        page.wait_for_selector("#status[data-kind=live]")
        traffic = Traffic(engine, loop)
        for i in range(60):
            traffic.send("a common beginning, then " + "xyz"[i % 3] * rng.randint(1, 90), 60)
        wait_until(lambda: traffic.is_over, 120.0)
        time.sleep(1.5)
        # Another page begins with a snapshot; the first came here by deltas alone.
        other = open_page(url)
        other.wait_for_selector("#status[data-kind=live]")
        assert page.evaluate(READ_STATE) == other.evaluate(READ_STATE)
        assert page.evaluate("[...inspector.state.hits]") == other.evaluate(
            "[...inspector.state.hits]"
        )


@pytest.mark.slow  # as above
def test_loaded_trace_is_played_and_left_again(open_page, complaints, tmp_path):
    record(tmp_path / "trace.jsonl")
    (tmp_path / "junk").write_text("no trace")
    with serve(make_client(num_blocks=32, step_s=0.01, max_num_seqs=2)) as (url, _):
        page = open_page(url)
        page.wait_for_selector("#status[data-kind=live]")
        page.set_input_files("#trace", tmp_path / "trace.jsonl")
        page.wait_for_selector("#status[data-kind=trace]")
        wait_until(lambda: "6 requests" in page.inner_text("#source"))
        # It plays to its end by itself.
        page.wait_for_selector("#log .event[data-kind=preempted]")
        last = page.evaluate("inspector.shown().length") - 1
        wait_until(lambda: page.evaluate("inspector.viewIndex()") == last)
        assert page.evaluate("inspector.state.n") == 12
        page.fill("#scrub", "3")
        wait_until(lambda: page.locator("#running .request").count() == 3)
        page.keyboard.press("Escape")
        page.click("#forward")
        assert page.evaluate("inspector.viewIndex()") == 4
        page.set_input_files("#trace", tmp_path / "junk")
        wait_until(lambda: "no complete first line" in page.inner_text("#note"))
        page.click("#live")
        page.wait_for_selector("#status[data-kind=live]")
        assert page.evaluate("inspector.state.n") == 32 and not page.is_visible("#note")
        complaints.remove(next(c for c in complaints if "400 (Bad Request)" in c))


@pytest.mark.slow  # as above
@pytest.mark.parametrize("width", [1600, 1000, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_cut_off_and_nothing_jumps(open_page, width, scheme):
    engine = make_client(num_blocks=500, step_s=0.01, max_num_seqs=8)
    with serve(engine) as (url, loop):
        page = open_page(url, color_scheme=scheme, viewport={"width": width, "height": 900})
        page.wait_for_selector("#status[data-kind=live]")
        # The map gets its height with the first frame, a moment after the stream is open.
        wait_until(lambda: page.inner_text("#kpi-running") == "0")
        before = page.evaluate(SETTLED_TOPS)
        traffic = Traffic(engine, loop)
        for i in range(12):
            traffic.send(f"prompt number {i}", 100)
        page.wait_for_selector("#running .request")
        page.hover("#map")
        page.wait_for_selector("#details dl")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        while_running = page.evaluate(SETTLED_TOPS)
        wait_until(lambda: traffic.is_over, 120.0)
        for tops in (while_running, page.evaluate(SETTLED_TOPS)):
            assert tops == pytest.approx(before, abs=2)
        assert not traffic.failures
        # The page asks for the block under the pointer, and would complain of a server that ended.
        page.close()
