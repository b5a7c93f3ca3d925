"""Outputs become choices; an echoed prompt is scored with them."""

import dataclasses

import pytest

from paxkv.contracts.request_output import CompletionOutput, Logprob, RequestOutput
from paxkv.errors import InvalidRequestError
from paxkv.server.protocol.completion_choices import CompletionChoices, best_completions
from paxkv.server.protocol.openai_protocol import parse_completion
from paxkv.server.protocol.openai_responses import completion_logprobs
from tests.paxkv.server.fake_engine import FakeTokenizer


def _position(token_id, logprob=-0.5):
    return {token_id: Logprob(logprob=logprob, rank=1, decoded_token=chr(token_id))}


def _output(text, *, is_last=True, prompt="abc", scored=True, index=0):
    token_ids = list(map(ord, text))
    completion = CompletionOutput(
        index=index,
        text=text,
        token_ids=token_ids,
        logprobs=[_position(i) for i in token_ids],
        finish_reason="length" if is_last else None,
    )
    positions = [None, *(_position(ord(c), -2.0) for c in prompt[1:])]
    return RequestOutput(
        request_id="r",
        prompt=prompt,
        prompt_token_ids=list(map(ord, prompt)),
        outputs=[completion],
        finished=is_last,
        prompt_logprobs=positions if scored else None,
    )


def _taken(made, output, prompt_idx=0):
    """The choice of the one completion of an output."""
    (completion,) = made.kept(output)
    return made.make_choice(prompt_idx, output, completion)


def _made(prompts=("abc",), **fields):
    body = parse_completion({"prompt": list(prompts)} | fields)
    return CompletionChoices(body, list(prompts), FakeTokenizer())


def test_the_best_have_the_highest_logprob_per_token():
    def completion(index, num_tokens, cumulative_logprob):
        return CompletionOutput(
            index=index,
            text="",
            token_ids=[0] * num_tokens,
            cumulative_logprob=cumulative_logprob,
            finish_reason="length",
        )

    # Per token -1, -0.5, -2, -0.5: the sums are in another order.
    drawn = [completion(0, 1, -1.0), completion(1, 8, -4.0), completion(2, 1, -2.0)]
    drawn.append(completion(3, 2, -1.0))
    kept = best_completions(drawn, 3)
    assert [len(c.token_ids) for c in kept] == [8, 2, 1]
    assert [c.index for c in kept] == [0, 1, 2]


def test_an_echoed_prompt_without_completion_has_no_stop_reason():
    output = _output("x")
    stopped = dataclasses.replace(output.outputs[0], finish_reason="stop", stop_reason="x")
    output = dataclasses.replace(output, outputs=[stopped])
    choice = _taken(_made(echo=True, max_tokens=0), output)
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("abc", "length", None)
    choice = _taken(_made(echo=True, max_tokens=1), output)
    assert (choice.finish_reason, choice.stop_reason) == ("stop", "x")


def test_the_echoed_prompt_is_scored_except_its_first_token():
    choice = _taken(_made(echo=True, logprobs=1), _output("xy"))
    assert choice.text == "abcxy"
    logprobs = choice.logprobs
    assert logprobs.tokens == list("abcxy")
    assert logprobs.token_logprobs == [None, -2.0, -2.0, -0.5, -0.5]
    assert logprobs.text_offset == [0, 1, 2, 3, 4]
    assert logprobs.top_logprobs[:2] == [None, {"b": -2.0}]


def test_the_likelier_of_two_tokens_with_the_same_text_is_returned():
    position = {
        token_id: Logprob(logprob=-float(rank), rank=rank, decoded_token=text)
        for rank, (token_id, text) in enumerate([(7, "x"), (8, "?"), (9, "?")], start=1)
    }
    logprobs = completion_logprobs([7], [position], 3, text_offset=0)
    assert logprobs.top_logprobs == [{"x": -1.0, "?": -2.0}]


@pytest.mark.parametrize("as_token_ids", [False, True])
def test_a_stream_adds_up_to_the_whole(as_token_ids):
    fields = {"echo": True, "logprobs": 1, "return_tokens_as_token_ids": as_token_ids}
    made = _made(**fields)
    parts = [
        _taken(made, _output("x", is_last=False)),
        _taken(made, _output("y", scored=False)),
    ]
    whole = _taken(_made(**fields), _output("xy"))
    assert "".join(part.text for part in parts) == whole.text
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        joined = [v for part in parts for v in getattr(part.logprobs, name)]
        assert joined == getattr(whole.logprobs, name)


def test_without_tokens_the_answer_is_the_prompt_alone():
    made = _made(echo=True, logprobs=1, max_tokens=0)
    output = _output("x")
    choice = _taken(made, output)
    assert (choice.text, choice.logprobs.tokens) == ("abc", list("abc"))
    assert made.num_tokens(output) == 0


def test_every_choice_starts_with_its_own_prompt():
    made = _made(("abc", [100, 101]), echo=True, n=2)
    texts = {}
    for prompt_idx, prompt in enumerate(("abc", "de")):
        for index in range(2):
            first = _output("x", is_last=False, prompt=prompt, index=index)
            for output in (first, _output("y", prompt=prompt, index=index)):
                choice = _taken(made, output, prompt_idx)
                texts[choice.index] = texts.get(choice.index, "") + choice.text
    assert texts == {0: "abcxy", 1: "abcxy", 2: "dexy", 3: "dexy"}


def test_scores_of_the_prompt_are_given_by_token_id():
    choice = _taken(_made(prompt_logprobs=1), _output("x"))
    first, second, _ = choice.prompt_logprobs
    assert first is None
    assert (second["98"].logprob, second["98"].rank, second["98"].decoded_token) == (-2.0, 1, "b")


def test_token_ids_are_given_when_asked():
    made = _made(return_token_ids=True)
    first, second = (_taken(made, output) for output in (_output("x", is_last=False), _output("y")))
    assert (first.prompt_token_ids, first.token_ids) == ([97, 98, 99], [120])
    assert second.token_ids == [121]


def test_token_ids_come_without_text_too():
    # Half a character, or a special token.
    output = _output("x", is_last=False)
    silent = dataclasses.replace(output.outputs[0], text="", logprobs=None)
    output = dataclasses.replace(output, outputs=[silent])
    choice = _taken(_made(return_token_ids=True), output)
    assert (choice.text, choice.token_ids) == ("", [120])
    assert _taken(_made(), output) is None


def test_echo_needs_a_tokenizer():
    body = parse_completion({"prompt": "abc", "echo": True})
    with pytest.raises(InvalidRequestError) as raised:
        CompletionChoices(body, ["abc"], None)
    assert raised.value.param == "echo"
