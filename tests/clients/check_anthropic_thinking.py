"""Thinking blocks with the `anthropic` package: `python check_anthropic_thinking.py URL`.

The demo model does not think. The server's reasoning parser takes its whole answer for thoughts,
as models do that begin with thoughts and are cut off.
"""

import sys

import anthropic

QUESTION = {"role": "user", "content": "What is 23 + 58?"}


def main(url: str) -> None:
    fields = {
        "model": "paxkv-demo",
        "max_tokens": 2000,
        "messages": [QUESTION],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "extra_body": {"temperature": 0, "max_tokens": 64},
    }
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        message = client.messages.create(**fields)
        (block,) = message.content
        assert block.type == "thinking" and block.thinking and block.signature
        assert message.usage.output_tokens_details.thinking_tokens == message.usage.output_tokens
        with client.messages.stream(**fields) as stream:
            types = [event.type for event in stream]
            final = stream.get_final_message()
        assert final.content == message.content
        assert "thinking" in types and "signature" in types
        # What came back may be sent again.
        fields["messages"] = [QUESTION, {"role": "assistant", "content": final.content}, QUESTION]
        assert client.messages.create(**fields).content
        fields["thinking"] = {"type": "adaptive", "display": "omitted"}
        assert client.messages.create(**fields).content == []
    print(f"ok  check_thinking: {block.thinking!r}")


if __name__ == "__main__":
    main(sys.argv[1])
