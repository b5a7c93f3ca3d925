"""Log-probabilities of a chat: the bytes of its tokens rebuild its text."""

from paxkv.contracts.request_output import CompletionOutput, Logprob
from paxkv.server.protocol.openai_responses import chat_logprobs
from tests.paxkv.text.small_tokenizers import byte_level_tokenizer


def test_bytes_of_the_tokens_join_to_the_text():
    tokenizer = byte_level_tokenizer([b"\xe6\xbc"])
    text = "é漢😀a"
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    positions = [
        {
            token_id: Logprob(logprob=-1.0, rank=2, decoded_token=tokenizer.token_text(token_id)),
            0xFF: Logprob(logprob=-0.5, rank=1, decoded_token=tokenizer.token_text(0xFF)),
        }
        for token_id in token_ids
    ]
    completion = CompletionOutput(index=0, text=text, token_ids=token_ids, logprobs=positions)
    found = chat_logprobs(completion, 2, token_bytes=tokenizer.token_bytes)
    assert bytes(byte for token in found.content for byte in token.bytes).decode() == text
    assert "\ufffd" in [token.token for token in found.content]
    first, second = found.content[0].top_logprobs
    assert (first.bytes, second.bytes) == ([0xFF], [0xC3])
