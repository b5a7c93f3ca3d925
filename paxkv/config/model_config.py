"""The model, its precision and its length limit, with their help texts."""

import dataclasses
from typing import Literal

from paxkv.config.generation_config import FROM_MODEL
from paxkv.config.sampling_defaults import GenerationConfig
from paxkv.config.setting import at_least, one_of, setting, strings
from paxkv.errors import ConfigError

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "safetensors", "dummy"]
ProductDtype = Literal["auto", "bfloat16", "int8"]
Quantization = Literal["none", "checkpoint", "int8", "int4", "fp8"]
QUANTIZATION_GROUP_SIZES = (32, 64, 128)
# Value of `max_model_len`: the longest length that fits into the KV cache.
FIT_MEMORY = -1
AUTO_MODEL_IMPL = "auto"
ChatTemplateContentFormat = Literal["auto", "string", "openai"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The model, its precision and its length limit."""

    model: str | None = setting(
        "folder of a Hugging Face checkpoint, its name on the hub, or a GGUF file, on the hub "
        "OWNER/NAME:QUANT; the embedded demo model if left out",
        None,
    )
    revision: str | None = setting(
        "branch, tag or commit of a model on the hub; the main branch if left out", None
    )
    tokenizer: str | None = setting(
        "folder of another tokenizer and its chat template, or their name on the hub; the model's "
        "own if left out",
        None,
    )
    tokenizer_revision: str | None = setting(
        "branch, tag or commit of the tokenizer on the hub; --revision if the tokenizer is the "
        "model's own, else the main branch",
        None,
    )
    hf_token: str | None = setting(
        "access token of the hub, for gated repositories. If left out, it is HF_TOKEN, or the "
        "token of `hf auth login`. Other users of the machine can see the flags of a process, but "
        "not its variables",
        None,
        is_secret=True,
    )
    served_model_name: tuple[str, ...] = setting(
        "names in the API; answers contain the first one. The value of --model if left out", ()
    )
    dtype: Dtype = setting(
        "precision of weights and activations; auto is float32 on the CPU and the checkpoint's "
        "own elsewhere",
        "auto",
        spellings={"half": "float16", "float": "float32"},
    )
    product_dtype: ProductDtype = setting(
        "precision of weights and activations in matrix products; auto is that of --dtype. "
        "bfloat16 and int8 are faster on processors that have instructions for them, and change "
        "answers: docs/guide/tuning.md says by how much",
        "auto",
    )
    quantization: Quantization = setting(
        "form in which matrices and experts stay in memory. int8, int4 and fp8 quantize them while "
        "the model loads, and change answers: docs/guide/tuning.md says by how much. Activations "
        "are not rounded. checkpoint keeps the numbers of a quantized checkpoint, with the same "
        "answers as none, which widens them to --dtype",
        "none",
    )
    quantization_group_size: int = setting(
        "inputs of a matrix that share a scale with --quantization: 32, 64 or 128. Small groups "
        "are more accurate and take more memory. A matrix whose number of inputs is not a multiple "
        "gets the largest size that divides both numbers",
        128,
    )
    seed: int = setting("seed of random weights, and of requests without a seed", 0)
    max_model_len: int | None = setting(
        "largest number of prompt and output tokens of a request. If left out, it is the model's "
        "own limit, with its rotary embedding's scaling. If the KV cache has no room for one "
        "request of that length, it is the longest length that fits, with a warning. auto, or -1, "
        "is the same without the warning",
        None,
        spellings={"auto": FIT_MEMORY},
    )
    load_format: LoadFormat = setting(
        "auto reads safetensors or GGUF; dummy makes random weights", "auto"
    )
    model_impl: str = setting(
        "class that runs the model: auto is paxkv's class for the architecture in config.json; "
        "module:Class or path/to/file.py:Class is a class of your own, in a module on Python's "
        "path or in the current folder: docs/guide/adding-a-model.md",
        AUTO_MODEL_IMPL,
    )
    chat_template: str | None = setting(
        "jinja template of chats, instead of the checkpoint's: a file, or the template itself in "
        "a single line",
        None,
    )
    chat_template_content_format: ChatTemplateContentFormat = setting(
        "whether the chat template expects the contents of messages as strings, or as OpenAI's "
        "lists of parts; auto finds out from the template",
        "auto",
    )
    generation_config: str = setting(
        "source of the generation_config.json with defaults for sampling parameters that requests "
        "do not set: auto is the model's own file, vllm is no file (temperature 1, no filters), "
        "any other value is a folder. The folder's max_new_tokens also limits requests that ask "
        "for more",
        FROM_MODEL,
    )
    override_generation_config: GenerationConfig = setting(
        "JSON object that overrides values of that file: temperature, top_p, top_k, min_p, "
        "repetition_penalty and max_new_tokens, which also limits requests that ask for more",
        GenerationConfig(),
    )

    def __post_init__(self) -> None:
        one_of(
            "chat_template_content_format",
            self.chat_template_content_format,
            ChatTemplateContentFormat.__args__,
        )
        one_of("product_dtype", self.product_dtype, ProductDtype.__args__)
        one_of("quantization", self.quantization, Quantization.__args__)
        one_of("quantization_group_size", self.quantization_group_size, QUANTIZATION_GROUP_SIZES)
        if self.quantization != "none" and self.product_dtype != "auto":
            raise ConfigError(
                f"quantization is {self.quantization!r} and product_dtype is "
                f"{self.product_dtype!r}; matrices have one form. Set one of the two."
            )
        one_of("dtype", self.dtype, Dtype.__args__)
        one_of("load_format", self.load_format, LoadFormat.__args__)
        _model_impl(self.model_impl)
        if self.max_model_len != FIT_MEMORY:
            at_least("max_model_len", self.max_model_len, 2)
        for name in ("revision", "tokenizer", "tokenizer_revision"):
            if not (getattr(self, name) is None or isinstance(getattr(self, name), str)):
                raise ConfigError(f"{name} must be a string, got {getattr(self, name)!r}.")
        if self.hf_token is not None and not (isinstance(self.hf_token, str) and self.hf_token):
            # The message does not show the value, which may be a secret, such as a list of tokens.
            kind = type(self.hf_token).__name__
            got = "an empty string" if self.hf_token == "" else f"a value of type {kind}"
            raise ConfigError(
                f"hf_token must be a string, an access token of the Hugging Face Hub; got {got}. "
                "Leave it out to use HF_TOKEN or the token of `hf auth login`."
            )
        strings("served_model_name", self.served_model_name)
        if self.model is None and len(self.served_model_name) > 1:
            # `--served-model-name demo PATH` must not serve the demo model under the name PATH.
            raise ConfigError(
                f"served_model_name has {len(self.served_model_name)} names, but no model is "
                "named: the flag takes all words that follow it. Put the model before the flag, or "
                "use --model."
            )
        if not isinstance(self.generation_config, str) or not self.generation_config:
            raise ConfigError(
                f"generation_config must be auto, vllm or a folder, got {self.generation_config!r}."
            )
        if type(self.seed) is not int or not -(2**63) <= self.seed < 2**63:
            raise ConfigError(f"seed must be an integer of 64 bits, got {self.seed!r}.")


def _model_impl(value: object) -> None:
    """Checks only the format; the process that loads the model imports the module."""
    module, _, class_name = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    if value != AUTO_MODEL_IMPL and not (module and class_name.isidentifier()):
        raise ConfigError(
            f"model_impl must be {AUTO_MODEL_IMPL}, module:Class such as my_model:MyModel, or "
            f"path/to/file.py:Class, got {value!r}. With {AUTO_MODEL_IMPL}, paxkv's own class for "
            "the architecture runs the model; there are no other implementations."
        )
