"""The error tree: who made the mistake, and which HTTP status it becomes.

PaxkvError
├── InvalidRequestError        400  the caller's mistake; `param` names the field
│   ├── PromptTooLongError     400  the prompt alone is too long
│   ├── NeverFitsError         400  prompt and max_tokens could not fit the KV pool even alone
│   └── UnsupportedFeatureError 400 a known field that this version cannot honour
├── ChatTemplateError          500  the model's chat template cannot be compiled
├── SlowReaderError            408  too much of an answer waits for its client to read
├── ConfigError                     a setting that cannot work; raised at construction
│   └── KVCacheTooSmallError        the KV cache holds no request of max_model_len
├── TraceFileError                  a file that is no trace of this version; `paxkv.replay` exits 2
├── EngineDeadError            503  the engine stopped; requests end with this
│   └── ForkedProcessError     503  the engine runs in the process that this one was forked from
├── EngineStalledError         503  requests wait, and the engine completes no step
└── InvariantError             500  our own mistake; a bug
"""


class PaxkvError(Exception):
    """Root of every error that paxkv raises on purpose."""

    http_status = 500


class InvalidRequestError(PaxkvError, ValueError):
    """A request that cannot be honored as it was sent.

    Args:
        message: What is wrong, what came, what is allowed, what to do.
        param: Name of the request field at fault, or None when it is the request as a whole.
    """

    http_status = 400

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLongError(InvalidRequestError):
    """The prompt alone is longer than max_model_len, the KV cache or a step has room for.

    Clients search the message for the words of Anthropic's and OpenAI's errors, and shorten their
    conversation then. `prompt_too_long` makes such messages.
    """


class NeverFitsError(InvalidRequestError):
    """The prompt and its max_tokens need more KV blocks than the whole pool has."""


class UnsupportedFeatureError(InvalidRequestError):
    """A field that is part of the API but not supported by this version."""


class ChatTemplateError(PaxkvError):
    """The chat template that came with the model cannot be compiled; no request is at fault."""


class SlowReaderError(PaxkvError):
    """The client reads its stream so slowly that too much of the answer waits for it."""

    http_status = 408


class ConfigError(PaxkvError, ValueError):
    """A setting, or a combination of settings, that cannot work."""


class KVCacheTooSmallError(ConfigError):
    """The KV cache would not hold even one request of max_model_len tokens.

    Args:
        max_fitting_len: The largest max_model_len of which it holds one request; 0 if none.
    """

    def __init__(self, message: str, *, max_fitting_len: int = 0) -> None:
        super().__init__(message)
        self.max_fitting_len = max_fitting_len


class TraceFileError(PaxkvError, ValueError):
    """A file that cannot be read as a trace of this version."""


class EngineDeadError(PaxkvError, RuntimeError):
    """The engine loop ended; nothing more can be computed.

    Args:
        retry_after_s: Another engine is being started and may be ready then; None: none is.
    """

    http_status = 503

    def __init__(self, message: str, *, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineStalledError(PaxkvError):
    """Requests wait, and the engine has completed no step for too long."""

    http_status = 503


class ForkedProcessError(EngineDeadError):
    """A fork of the engine's process used the engine, which continues to run in that process."""


class InvariantError(PaxkvError, RuntimeError):
    """A rule of our own was broken: a bug in paxkv, never the caller's fault."""


def prompt_too_long(num_tokens: str, most: int, context_length: str, remedy: str) -> str:
    """The message of a prompt that is too long, in words that clients search for.

    "prompt is too long: 100 tokens > 99 maximum. This model's maximum context length is 100 tokens.
    ...": the first sentence is Anthropic's, the second one OpenAI's.

    Args:
        num_tokens: The prompt's number of tokens, such as "100" or "at least 100".
        most: Number of tokens that it may have.
        context_length: Number of tokens of prompt and answer together, and what limits it.
        remedy: What to do; a sentence.
    """
    return (
        f"prompt is too long: {num_tokens} tokens > {most} maximum. This model's maximum context "
        f"length is {context_length}. {remedy}"
    )
