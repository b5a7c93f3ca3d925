"""LLM returns every answer in order, refuses mistakes before it runs, and leaves nothing behind."""

import dataclasses
import gc
import inspect
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

import paxkv
from paxkv.client.output_processor import ProcessedOutputs
from paxkv.config.sampling_params import SamplingParams
from paxkv.contracts.engine_output import StepOutputs
from paxkv.errors import (
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    InvariantError,
    NeverFitsError,
)
from paxkv.llm import LLM
from tests.paxkv.fake_build import fake_model_parts, save_tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}|{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)
BOS_ID = 256


@pytest.fixture
def make_llm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., LLM]]:
    """Makes LLMs that echo their prompts; all are closed at the end."""
    runner_class = fake_model_parts(monkeypatch)
    save_tokenizer(tmp_path, chat_template=TEMPLATE)
    made = []

    def make(*, fails_at_step: int | None = None, **arguments: object) -> LLM:
        runner_class.fails_at_step = fails_at_step
        made.append(LLM(str(tmp_path), **arguments))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


def texts(outputs: list[paxkv.RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def test_answers_come_in_the_order_of_the_prompts(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(max_num_seqs=4)
    prompts = [f"<{number}>" for number in range(30)]
    # Short and long in turn, so that they do not finish in order.
    params = [SamplingParams(max_tokens=5 if n % 2 else 40) for n in range(30)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    for prompt, param, output in zip(prompts, params, outputs, strict=True):
        assert output.outputs[0].token_ids == ([BOS_ID, *prompt.encode()] * 40)[: param.max_tokens]
        assert output.finished


def test_none_is_the_default_of_every_argument(make_llm: Callable[..., LLM]) -> None:
    names = set(inspect.signature(LLM).parameters) - {"model", "settings"}
    llm = make_llm(**dict.fromkeys(names), max_num_seqs=None, pipeline_parallel_size=None)
    (output,) = llm.generate("ab", SamplingParams(max_tokens=2), use_tqdm=False)
    assert output.finished


def test_an_answer_ends_whole_where_settings_leave_no_token(
    make_llm: Callable[..., LLM],
) -> None:
    params = SamplingParams(max_tokens=9, allowed_token_ids=[97], bad_words=["aaa"])
    (output,) = make_llm().generate({"prompt_token_ids": [97]}, params, use_tqdm=False)
    (completion,) = output.outputs
    assert (completion.text, completion.token_ids) == ("aa", [97, 97])
    assert completion.finish_reason == "stop"
    assert "leave none of the tokens" in completion.stop_reason


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("ab", ["ab"]),
        ([97, 98], ["aba"]),
        ({"prompt_token_ids": [97, 98]}, ["aba"]),
        ({"prompt": "ab"}, ["ab"]),
        (["ab", [99], {"prompt_token_ids": [100]}], ["ab", "ccc", "ddd"]),
        ([[97, 98], [99]], ["aba", "ccc"]),
        ([], []),
    ],
    ids=repr,
)
def test_every_form_of_prompts_is_taken(
    make_llm: Callable[..., LLM], prompts: object, expected: list[str]
) -> None:
    outputs = make_llm().generate(prompts, SamplingParams(max_tokens=3), use_tqdm=False)
    assert texts(outputs) == expected


def test_default_sampling_params_make_sixteen_tokens(make_llm: Callable[..., LLM]) -> None:
    (output,) = make_llm().generate([97], use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 16


def test_defaults_are_the_models_and_given_params_are_taken_as_they_are(
    make_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    fields = {"temperature": 0.6, "top_k": 20, "max_new_tokens": 5}
    (tmp_path / "generation_config.json").write_text(json.dumps(fields))
    llm = make_llm()
    assert llm.get_default_sampling_params() == SamplingParams(
        temperature=0.6, top_k=20, max_tokens=5
    )
    hello = [{"role": "user", "content": "hi"}]
    for params, num_tokens in (
        (None, 5),
        (SamplingParams(), 16),
        (SamplingParams(max_tokens=9), 9),
    ):
        for outputs in (
            llm.generate([97], params, use_tqdm=False),
            llm.chat(hello, params, use_tqdm=False),
        ):
            assert len(outputs[0].outputs[0].token_ids) == num_tokens
    assert make_llm(generation_config="vllm").get_default_sampling_params() == SamplingParams()
    changed = make_llm(override_generation_config={"top_k": None, "max_new_tokens": 7})
    assert changed.get_default_sampling_params() == SamplingParams(temperature=0.6, max_tokens=7)
    named = make_llm(generation_config=tmp_path)
    assert named.get_default_sampling_params() == llm.get_default_sampling_params()
    with pytest.raises(ConfigError, match="auto, vllm or a folder, got 5"):
        make_llm(generation_config=5)
    assert make_llm(generation_config=None).get_default_sampling_params().top_k == 20
    with pytest.raises(ConfigError, match="got top_q"):
        make_llm(override_generation_config={"top_q": 1})
    with pytest.raises(ConfigError, match="must be a JSON object"):
        make_llm(override_generation_config=[])


def test_a_default_length_is_cut_to_what_fits_and_a_given_one_is_not(
    make_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    (tmp_path / "generation_config.json").write_text('{"max_new_tokens": 60}')
    # Two blocks of 16: 32 places, and one token more that is never fed back.
    small = {"num_gpu_blocks_override": 3, "max_model_len": 64}
    llm = make_llm(**small)
    prompt, hello = [97] * 20, [{"role": "user", "content": "b" * 18}]
    params = llm.get_default_sampling_params()
    assert params.max_tokens == 60
    for fields in ({}, {"sampling_params": params, "cuts_max_tokens": True}):
        for (output,) in (
            llm.generate([prompt], use_tqdm=False, **fields),
            llm.chat(hello, use_tqdm=False, **fields),
        ):
            assert len(output.prompt_token_ids) == 20
            assert len(output.outputs[0].token_ids) == 13
    for call, argument in ((llm.generate, prompt), (llm.chat, hello)):
        with pytest.raises(NeverFitsError, match="at most 13 tokens"):
            call(argument, params, use_tqdm=False)
        with pytest.raises(InvalidRequestError, match="True or False, got 'no'"):
            call(argument, use_tqdm=False, cuts_max_tokens="no")
    open_ended = paxkv.BeamSearchParams(beam_width=1, max_tokens=None)
    (search,) = llm.beam_search([prompt], open_ended)
    assert len(search.sequences[0].tokens) == 33
    # Without such a file, 16 are the default that is cut.
    (output,) = make_llm(generation_config="vllm", **small).generate(prompt, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 13


@pytest.mark.parametrize(
    "arguments",
    [
        {"prompts": ["a", []]},
        {"prompts": ["a", [9999]]},
        {"prompts": ["a", "b" * 200]},
        {"prompts": 7},
        {"prompts": ["a", "b"], "sampling_params": [SamplingParams()]},
        {"prompts": ["a", "b"], "priority": [1]},
        {"prompts": ["a"], "priority": "high"},
        {"prompts": ["a"], "sampling_params": {"temperature": 1}},
    ],
    ids=repr,
)
def test_mistake_anywhere_raises_before_anything_runs(
    make_llm: Callable[..., LLM], arguments: dict
) -> None:
    llm = make_llm()
    with pytest.raises(InvalidRequestError):
        llm.generate(**arguments, use_tqdm=False)
    assert llm.get_stats().num_steps == 0


def test_unknown_argument_is_named(make_llm: Callable[..., LLM]) -> None:
    with pytest.raises(TypeError, match="tensor_parallel_sizes"):
        make_llm(tensor_parallel_sizes=2)
    # Also with the value that asks for nothing.
    with pytest.raises(TypeError, match="max_num_sequences"):
        make_llm(max_num_sequences=None)


def test_chat_renders_one_conversation_or_several(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    params = SamplingParams(max_tokens=3)
    hello = [{"role": "user", "content": "hi"}]
    (output,) = llm.chat(hello, params, use_tqdm=False)
    # No BOS: the template is to write it.
    assert (output.prompt, output.prompt_token_ids) == ("hi|>", list(b"hi|>"))
    outputs = llm.chat([hello, hello], params, use_tqdm=False, add_generation_prompt=False)
    assert [output.prompt for output in outputs] == ["hi|", "hi|"]
    (output,) = llm.chat(
        hello,
        params,
        use_tqdm=False,
        chat_template="{{ bos_token }}{{ mood }}",
        chat_template_kwargs={"mood": "calm"},
    )
    assert output.prompt_token_ids == [BOS_ID, *b"calm"]


def test_chat_tells_an_engine_that_saves_states_where_the_user_begins(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm()
    info = dataclasses.replace(llm._engine.model_info, saves_states=True)
    monkeypatch.setattr(llm, "_engine", dataclasses.replace(llm._engine, model_info=info))
    added = []
    monkeypatch.setattr(llm._client, "add_request", lambda request, prompt: added.append(request))
    monkeypatch.setattr(llm._client, "wait_for_outputs", lambda: 1 / 0)
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    with pytest.raises(ZeroDivisionError):
        llm.chat(messages, use_tqdm=False)
    assert added[0].prompt_token_ids == list(b"be brief|hi|>")
    assert added[0].num_leading_tokens == len("be brief|")


def test_chat_without_messages_or_template_is_refused(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    with pytest.raises(InvalidRequestError):
        llm.chat([[]], use_tqdm=False)
    with pytest.raises(InvalidRequestError):
        llm.chat([{"content": "no role"}], use_tqdm=False)


def test_priority_decides_which_request_runs_first(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(max_num_seqs=1, scheduling_policy="priority")
    order = []
    wait = llm._client.wait_for_outputs

    def watch() -> list[paxkv.RequestOutput]:
        outputs = wait()
        order.extend(output.prompt for output in outputs)
        return outputs

    llm._client.wait_for_outputs = watch
    llm.generate(["a", "b", "c"], SamplingParams(max_tokens=2), priority=[3, 1, 2], use_tqdm=False)
    # "a" may have begun before the others came.
    assert [prompt for prompt in order if prompt != "a"] == ["b", "c"]


def test_prefix_cache_is_used_and_reset(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    params = SamplingParams(max_tokens=1)
    prompt = [97] * 40
    cached = [llm.generate(prompt, params, use_tqdm=False)[0].num_cached_tokens for _ in range(2)]
    assert cached == [0, 32]
    assert llm.reset_prefix_cache()
    assert llm.generate(prompt, params, use_tqdm=False)[0].num_cached_tokens == 0


def test_n_completions_of_each_prompt_come_by_index(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(max_num_seqs=3)
    outputs = llm.generate(["ab", "cd"], SamplingParams(n=4, max_tokens=6), use_tqdm=False)
    for output, prompt in zip(outputs, ["ab", "cd"], strict=True):
        assert output.prompt == prompt
        assert [c.index for c in output.outputs] == [0, 1, 2, 3]
        assert {tuple(c.token_ids) for c in output.outputs} == {(BOS_ID, *prompt.encode()) * 2}
    assert until_idle(llm)


def test_beam_search_finds_sequences_for_each_prompt(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    params = paxkv.BeamSearchParams(beam_width=2, max_tokens=4)
    # The fake's only candidates are the first token of the prompt at -0.5 and "a" at -2.
    prompts = [[120], {"prompt_token_ids": [121, 122]}, *([[98]] * 20)]
    outputs = llm.beam_search(prompts, params)
    assert len(outputs) == 22
    best, second = outputs[0].sequences
    assert (best.text, best.tokens, best.cum_logprob) == ("xxxxx", [120] * 5, -2.0)
    assert (second.cum_logprob, second.finish_reason) == (-3.5, "length")
    assert outputs[1].sequences[0].text == "yzyyyy"
    assert {output.sequences[0].text for output in outputs[2:]} == {"bbbbb"}
    assert llm.beam_search(prompts, params, concurrency_limit=3) == outputs
    assert llm.beam_search([], params) == []
    assert until_idle(llm)


@pytest.mark.parametrize(
    "arguments",
    [
        {"prompts": ["a", []]},
        {"prompts": ["a"], "params": SamplingParams()},
        {"prompts": ["a" * 200]},
        {"prompts": ["a", "b"], "priority": [1]},
        {"prompts": ["a"], "concurrency_limit": 0},
    ],
    ids=repr,
)
def test_mistake_in_a_beam_search_raises_before_anything_runs(
    make_llm: Callable[..., LLM], arguments: dict
) -> None:
    llm = make_llm()
    with pytest.raises(InvalidRequestError):
        llm.beam_search(
            **{"params": paxkv.BeamSearchParams(beam_width=2, max_tokens=4), **arguments}
        )
    assert llm.get_stats().num_steps == 0


def test_interrupted_beam_search_leaves_nothing(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    wait = llm._client.wait_for_outputs
    for num_steps in range(4):
        left = [num_steps]

        def interrupted(left: list[int] = left) -> list[paxkv.RequestOutput]:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            return wait()

        llm._client.wait_for_outputs = interrupted
        with pytest.raises(KeyboardInterrupt):
            llm.beam_search(["ab", "cd"], paxkv.BeamSearchParams(beam_width=2, max_tokens=50))
        assert until_idle(llm)
    llm._client.wait_for_outputs = wait
    assert llm._client.num_unfinished_requests == 0


def until_idle(llm: LLM) -> bool:
    """True when no request is left and no block is held, kept ones included."""
    while llm.get_stats().num_free_blocks != llm.get_stats().num_blocks - 1:
        pass
    stats = llm.get_stats()
    return (stats.num_running_reqs, stats.num_waiting_reqs) == (0, 0)


def test_miss_of_the_prefix_cache_is_explained(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    (output,) = llm.generate([[97] * 40], SamplingParams(max_tokens=1), use_tqdm=False)
    miss = llm.explain_prefix_cache_miss(output.request_id)
    assert (miss.reason, miss.num_tokens, miss.num_hit_tokens) == ("first_block_differs", 40, 0)
    with pytest.raises(paxkv.errors.PaxkvError, match="explain_prefix_cache_miss failed"):
        llm.explain_prefix_cache_miss("nobody")


def test_interrupt_aborts_what_is_queued(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    wait = llm._client.wait_for_outputs

    def interrupted() -> None:
        raise KeyboardInterrupt

    llm._client.wait_for_outputs = interrupted
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a"] * 5, SamplingParams(max_tokens=100), use_tqdm=False)
    llm._client.wait_for_outputs = wait
    assert llm._client.num_unfinished_requests == 0
    stats = llm.get_stats()
    assert (stats.num_running_reqs, stats.num_waiting_reqs) == (0, 0)
    outputs = llm.generate(["b"], SamplingParams(max_tokens=2), use_tqdm=False)
    assert texts(outputs) == ["b"]


def test_dead_engine_is_an_error_of_every_call(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(fails_at_step=1)
    for _ in range(2):
        with pytest.raises(EngineDeadError):
            llm.generate("a", SamplingParams(max_tokens=9), use_tqdm=False)
    with pytest.raises(EngineDeadError):
        llm.get_stats()


def test_refusal_by_the_engine_is_our_bug(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    llm._engine.input_processor._max_fitting_tokens = 10**6
    llm._engine.input_processor._max_model_len = 10**6
    with pytest.raises(InvariantError, match="refused"):
        llm.generate([[97] * 3000, [97]], use_tqdm=False)
    assert llm._client.num_unfinished_requests == 0


def test_end_that_the_request_brought_about_is_its_own_mistake(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a grammar that bans leave no token of."""
    llm = make_llm()
    process = llm._client._output_processor.process

    def end(step: StepOutputs) -> ProcessedOutputs:
        ends = [
            msgspec.structs.replace(o, finish_reason="error", stop_reason="none is left")
            for o in step.outputs
        ]
        return process(dataclasses.replace(step, outputs=ends))

    monkeypatch.setattr(llm._client._output_processor, "process", end)
    with pytest.raises(InvalidRequestError, match="none is left") as raised:
        llm.generate([[97]], SamplingParams(max_tokens=1), use_tqdm=False)
    assert raised.value.param == "structured_outputs"


def test_calls_of_several_threads_take_turns(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    results = {}

    def run(letter: str) -> None:
        params = SamplingParams(max_tokens=20)
        results[letter] = texts(llm.generate([[ord(letter)]] * 5, params, use_tqdm=False))

    threads = [threading.Thread(target=run, args=(letter,)) for letter in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {letter: [letter * 20] * 5 for letter in "abcd"}


def test_close_ends_the_thread_and_may_be_repeated(make_llm: Callable[..., LLM]) -> None:
    with make_llm() as llm:
        thread = llm._engine.transport._thread
        assert thread.is_alive()
    llm.close()
    assert not thread.is_alive()
    with pytest.raises(EngineDeadError):
        llm.generate("a", use_tqdm=False)


def test_forgotten_llm_ends_its_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_model_parts(monkeypatch)
    llm = LLM(str(tmp_path))
    thread = llm._engine.transport._thread
    del llm
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


@pytest.fixture(scope="module")
def ended_program(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess:
    """A finished program that forked, generated tokens, and ended without a call of `close`.

    It has a time limit, because calls in the forked child would hang if `LLM` did not refuse them.
    """
    program = (
        "import os, pytest\n"
        "from tests.paxkv.fake_build import fake_model_parts\n"
        "fake_model_parts(pytest.MonkeyPatch())\n"
        "from paxkv import LLM, SamplingParams\n"
        "from paxkv.errors import ForkedProcessError\n"
        f"llm = LLM({str(tmp_path_factory.mktemp('model'))!r})\n"
        "calls = (lambda: llm.generate([97], SamplingParams(max_tokens=3)), llm.get_stats,\n"
        "         llm.reset_prefix_cache, lambda: llm._client.call('get_stats'))\n"
        # As if another thread were in a call during the fork.
        "llm._lock.acquire()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    for call in calls:\n"
        "        try:\n"
        "            call()\n"
        "        except ForkedProcessError as error:\n"
        "            print(error, flush=True)\n"
        "    llm.close()\n"
        # As multiprocessing ends a fork: JAX's own end may wait for threads that do not exist.
        "    os._exit(0)\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
        "llm._lock.release()\n"
        "print([len(call.outputs[0].token_ids) for call in calls[0]()])\n"
    )
    return subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program],
        cwd=Path(paxkv.__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_interpreter_ends_without_a_call_of_close(
    ended_program: subprocess.CompletedProcess,
) -> None:
    assert ended_program.returncode == 0, ended_program.stderr
    assert "Processed prompts: 100%" in ended_program.stderr


def test_a_fork_is_refused_and_leaves_the_engine_alone(
    ended_program: subprocess.CompletedProcess,
) -> None:
    *refusals, answer = ended_program.stdout.splitlines()
    assert answer == "[3]"
    assert ["start method 'spawn'" in refusal for refusal in refusals] == [True] * 4


def test_the_end_of_a_fork_does_not_end_the_engine(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm()
    # What the interpreter calls at its exit.
    _, function, arguments, _ = llm._finalizer.peek()
    with monkeypatch.context() as patch:
        pid = os.getpid()
        patch.setattr(os, "getpid", lambda: pid + 1)
        function(*arguments)
    outputs = llm.generate("a", SamplingParams(max_tokens=2), use_tqdm=False)
    assert len(outputs[0].outputs[0].token_ids) == 2


def test_settings_of_cache_and_scheduler_reach_the_engine(
    make_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    trace = tmp_path / "steps.jsonl"
    llm = make_llm(trace_file=str(trace), num_gpu_blocks_override=33, scheduling_policy="priority")
    llm.generate("ab", SamplingParams(max_tokens=2), use_tqdm=False)
    assert llm.get_stats().num_blocks == 33
    llm.close()
    header = trace.read_text().splitlines()[0]
    assert '"policy":"priority"' in header


def test_vllms_arguments_are_taken_where_they_ask_for_nothing(
    make_llm: Callable[..., LLM],
) -> None:
    given = {"pipeline_parallel_size": 1, "quantization": None, "tokenizer_mode": "auto"}
    # None leaves the choice to the engine, and so does a seed of None.
    given |= {"max_num_seqs": None, "seed": None, "enable_prefix_caching": None}
    llm = make_llm(**given, dtype="half", max_model_len="auto", served_model_name=["a", "b"])
    assert llm.model_info.model_names == ("a", "b")
    with pytest.warns(UserWarning, match="enforce_eager") as warned:
        make_llm(enforce_eager=True, trust_remote_code=True)
    # It points at the caller, not at the library.
    assert [warning.filename for warning in warned] == [__file__]
    with pytest.raises(ConfigError, match="pipeline_parallel_size=2"):
        make_llm(pipeline_parallel_size=2)


def test_unknown_setting_is_named(make_llm: Callable[..., LLM]) -> None:
    with pytest.raises(TypeError, match="no argument block_sizes; settings are .*block_size"):
        make_llm(block_sizes=8)
