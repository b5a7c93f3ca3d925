"""lm-eval with `tokenizer_backend=remote` against a running server.

Needs `pip install "lm_eval[api]"` and a server with `--enable-tokenizer-info-endpoint`:
`python tests/clients/lm_eval_remote_tokenizer.py http://127.0.0.1:8000`.
"""

import sys

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.utils import check_remote_tokenizer_support


def main(server_url: str) -> None:
    base_url = f"{server_url}/v1/completions"
    assert check_remote_tokenizer_support(base_url)
    # The server does not check the name of its only model if it is empty.
    model = LocalCompletionsAPI(
        model="",
        base_url=base_url,
        tokenizer_backend="remote",
        tokenized_requests=True,
        max_length=512,
    )
    tokenizer = model.tokenizer
    text = "The sum of 2 and 3 is"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([model.eot_token_id]) == tokenizer.eos_token
    continuations = (" 4", " 9")
    scores = model.loglikelihood(
        [
            Instance(request_type="loglikelihood", doc={}, arguments=("2 + 2 =", c), idx=i)
            for i, c in enumerate(continuations)
        ],
        disable_tqdm=True,
    )
    assert len(scores) == 2 and all(score < 0 for score, _ in scores)
    stop = {"until": ["\n"], "max_gen_toks": 8, "temperature": 0}
    (answer,) = model.generate_until(
        [Instance(request_type="generate_until", doc={}, arguments=("2 + 2 =", stop), idx=0)],
        disable_tqdm=True,
    )
    print(f"lm-eval {lm_eval.__version__}: {scores=}, {answer=}")


if __name__ == "__main__":
    main(sys.argv[1])
