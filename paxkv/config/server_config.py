"""All settings of the HTTP server, with their help texts. They are checked at construction."""

import dataclasses
import math
from typing import Literal

from paxkv.config.chat_template_kwargs import ChatTemplateKwargs
from paxkv.config.environment import API_KEY_VARIABLES
from paxkv.config.setting import at_least, is_number, one_of, setting, strings, true_or_false
from paxkv.config.structured_outputs_config import StructuredOutputsConfig
from paxkv.errors import ConfigError

ToolCallParser = Literal["hermes", "llama3_json"]
ReasoningParserName = Literal["qwen3", "deepseek_r1"]

# An engine can show progress only after it has loaded its libraries. From a slow disk this takes
# tens of seconds.
MIN_READY_TIMEOUT_S = 30.0
_OWN_PATHS = (
    *("/health", "/ping", "/load", "/metrics", "/version", "/openapi.json"),
    *("/tokenize", "/detokenize", "/reset_prefix_cache", "/explain_prefix_cache_miss"),
    *("/start_profile", "/stop_profile", "/tokenizer_info", "/server_info"),
)
# Prefixes of other paths. With the root path "/v1/chat", for example, the server would strip it
# from "/v1/chat/completions", and no route would match.
_OWN_FOLDERS = ("/v1", "/inspector")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of the HTTP server."""

    host: str = setting("address to listen on", "127.0.0.1")
    port: int = setting("port to listen on; 0 picks a free one", 8000)
    root_path: str | None = setting(
        "path prefix under which a proxy offers the server, whether or not the proxy strips it",
        None,
    )
    max_waiting_requests: int | None = setting(
        "largest number of requests that may wait for a place in the running batch; further "
        "requests are answered immediately with 503 and Retry-After. Each prompt, and each of its "
        "n completions, counts as one. The batch has --max-num-seqs places or, while requests wait "
        "in the engine, as many as it runs. No limit if left out",
        None,
    )
    max_num_queued_reqs: int | None = setting(
        "largest number of running and waiting requests together; further requests are answered "
        "immediately with 503 and Retry-After. Each prompt, and each of its n completions, counts "
        "as one. No limit if left out",
        None,
    )
    max_body_bytes: int = setting("largest request body, in bytes", 4 * 2**20)
    max_header_bytes: int = setting(
        "largest size of a request's first line and headers, in bytes",
        64 * 2**10,
        aliases=("--h11-max-incomplete-event-size",),
    )
    h11_max_header_count: int | None = setting(
        "largest number of headers of a request; only --max-header-bytes limits it if left out",
        None,
    )
    max_connections: int | None = setting(
        "largest number of open connections; further ones are answered with 503 and closed. If "
        "left out, as many as the limit of open files allows, up to 65,000",
        None,
    )
    request_timeout_s: float = setting(
        "seconds that a client may take to send a whole request, or to read what the server has "
        "written, before the connection is closed",
        15.0,
    )
    max_unread_bytes: int = setting(
        "bytes of streamed answers of all requests that may wait in memory for slow clients. Above "
        "this limit, the request with the most waiting bytes ends with an error. A single request "
        "may have up to 32 MiB",
        256 * 2**20,
    )
    shutdown_timeout_s: float = setting(
        "seconds that running requests may take to finish after SIGTERM",
        30.0,
        aliases=("--shutdown-timeout",),
    )
    max_engine_restarts: int = setting(
        "how often in a row the server restarts an engine process that died, before it ends with "
        "exit code 1; with 0 it ends as soon as its engine dies",
        3,
    )
    engine_restart_window_s: float = setting(
        "seconds that an engine must serve before its restarts are no longer counted", 600.0
    )
    engine_ready_timeout_s: float = setting(
        "seconds without computing or reading after which a starting engine process is killed. The "
        "time that it computes is not limited. At least 30; 0 is no limit",
        600.0,
    )
    max_step_seconds: float = setting(
        "seconds without a completed step after which GET /health answers 503 with the reason, if "
        "requests wait. A step computes at most --max-num-batched-tokens tokens, so a long prompt "
        "takes many steps. 0 is no limit",
        120.0,
    )
    execute_model_timeout_s: float = setting(
        "seconds that a step of the model may take. Then the engine process is killed and "
        "restarted, as if it had died. 0 is no limit",
        300.0,
    )
    api_key: tuple[str, ...] = setting(
        "API keys. A client must send one of them as `Authorization: Bearer KEY` to use the routes "
        "under /v1 and the admin routes. If left out, they are read from the environment variable "
        "PAXKV_API_KEY, separated by commas, or from VLLM_API_KEY if that is empty. Other users of "
        "the machine can read flags, but not variables",
        (),
        environment=API_KEY_VARIABLES,
        is_secret=True,
    )
    ssl_keyfile: str | None = setting("private key, for HTTPS", None)
    ssl_certfile: str | None = setting("certificate, for HTTPS", None)
    ssl_ca_certs: str | None = setting(
        "certificates of the authorities that sign clients' certificates; see --ssl-cert-reqs", None
    )
    ssl_cert_reqs: int = setting(
        "whether clients authenticate by certificate: 0 never, 1 optionally, 2 always", 0
    )
    allowed_origins: tuple[str, ...] = setting(
        "origins of web pages that may use the server from a browser, as in '[\"https://a.org\"]'; "
        '["*"] allows all origins; none is allowed if left out',
        (),
        is_json=True,
    )
    allowed_methods: tuple[str, ...] = setting(
        "HTTP methods that pages of --allowed-origins may use", ("*",), is_json=True
    )
    allowed_headers: tuple[str, ...] = setting(
        "headers that pages of --allowed-origins may send", ("*",), is_json=True
    )
    allow_credentials: bool = setting(
        "let pages of --allowed-origins send cookies and other credentials", False
    )
    disable_fastapi_docs: bool = setting(
        "do not offer GET /openapi.json, the description of the API", False
    )
    enable_tokenizer_info_endpoint: bool = setting(
        "offer GET /tokenizer_info: the tokenizer's configuration and the chat template", False
    )
    disable_uvicorn_access_log: bool = setting("do not log a line per request", False)
    disable_access_log_for_endpoints: str | None = setting(
        "paths whose requests are not logged, separated by commas: /health,/metrics,/ping", None
    )
    disable_log_stats: bool = setting(
        "do not log throughput, requests and cache use every --log-stats-interval-s seconds; "
        "/metrics still has these numbers",
        False,
    )
    log_stats_interval_s: float = setting(
        "seconds between two log lines with statistics; nothing is logged if no request ran", 10.0
    )
    response_store_bytes: int = setting(
        "bytes of memory for stored answers of /v1/responses and their conversations, which "
        "previous_response_id, background and GET need. The least recently used answers are "
        "dropped; 0 stores none",
        64 * 2**20,
    )
    enable_admin: bool = setting(
        "offer POST /reset_prefix_cache, POST /start_profile, POST /stop_profile, "
        "GET /explain_prefix_cache_miss and GET /server_info, which are for operators and not for "
        "ordinary clients",
        False,
    )
    profile_dir: str | None = setting(
        "folder for the profiles of POST /start_profile, for TensorBoard or XProf", None
    )
    enable_inspector: bool | None = setting(
        "serve the page /inspector, which shows every request and the KV cache at work; if left "
        "out, on loopback addresses only",
        None,
    )
    inspector_show_text: bool = setting(
        "let the inspector show the text of blocks: prompts and answers of all clients",
        False,
    )
    inspector_max_trace_bytes: int = setting(
        "largest trace that the inspector page may replay, in bytes", 256 * 2**20
    )
    enable_force_include_usage: bool = setting(
        "end every stream of completions and chats with token counts, as if the request had set "
        "include_usage in stream_options",
        False,
    )
    stream_interval: int = setting(
        "smallest number of tokens in an event of a stream, except the first and the last event; "
        "requests may set their own",
        1,
    )
    default_chat_template_kwargs: ChatTemplateKwargs = setting(
        "variables of the chat template for chats whose chat_template_kwargs do not set them, as a "
        'JSON object: {"enable_thinking": false}',
        ChatTemplateKwargs(),
    )
    trust_request_chat_template: bool = setting(
        "allow requests with their own chat template, which is a program", False
    )
    enable_auto_tool_choice: bool = setting(
        "let the model decide whether to call tools; needs --tool-call-parser", False
    )
    tool_call_parser: ToolCallParser | None = setting(
        "format of the model's tool calls: hermes (also for Qwen) or llama3_json", None
    )
    exclude_tools_when_tool_choice_none: bool = setting(
        'leave tools out of the prompt if tool_choice is "none"', False
    )
    reasoning_parser: ReasoningParserName | None = setting(
        "format of the model's thoughts, which are then separated from its answer: qwen3 or "
        "deepseek_r1",
        None,
    )
    structured_outputs_config: StructuredOutputsConfig = setting(
        "settings for all structured outputs, as a JSON object with any of disable_any_whitespace, "
        "disable_additional_properties and enable_in_reasoning, each true or false",
        StructuredOutputsConfig(),
    )

    def __post_init__(self) -> None:
        if type(self.port) is not int or not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be in [0, 65535], got {self.port!r}.")
        at_least("max_waiting_requests", self.max_waiting_requests, 0)
        at_least("max_num_queued_reqs", self.max_num_queued_reqs, 1)
        at_least("stream_interval", self.stream_interval, 1)
        at_least("response_store_bytes", self.response_store_bytes, 0)
        at_least("max_body_bytes", self.max_body_bytes, 1)
        at_least("max_header_bytes", self.max_header_bytes, 256)
        at_least("h11_max_header_count", self.h11_max_header_count, 1)
        at_least("max_connections", self.max_connections, 1)
        at_least("max_unread_bytes", self.max_unread_bytes, 1)
        at_least("inspector_max_trace_bytes", self.inspector_max_trace_bytes, 1)
        if self.enable_inspector is not None:
            true_or_false("enable_inspector", self.enable_inspector)
        at_least("max_engine_restarts", self.max_engine_restarts, 0)
        for name in (
            *("request_timeout_s", "shutdown_timeout_s", "engine_restart_window_s"),
            "log_stats_interval_s",
        ):
            value = getattr(self, name)
            if not (is_number(value) and 0 < value < math.inf):
                raise ConfigError(f"{name} must be a positive number of seconds, got {value!r}.")
        for name in ("engine_ready_timeout_s", "execute_model_timeout_s", "max_step_seconds"):
            value = getattr(self, name)
            if not (is_number(value) and 0 <= value < math.inf):
                raise ConfigError(
                    f"{name} must be a number of seconds, or 0 for none, got {value!r}."
                )
        if 0 < self.engine_ready_timeout_s < MIN_READY_TIMEOUT_S:
            raise ConfigError(
                f"engine_ready_timeout_s must be at least {MIN_READY_TIMEOUT_S:g} seconds, or 0 "
                f"for none, got {self.engine_ready_timeout_s!r}."
            )
        for name in (
            *("allow_credentials", "disable_uvicorn_access_log", "disable_log_stats"),
            *("disable_fastapi_docs", "enable_tokenizer_info_endpoint"),
            "enable_force_include_usage",
            "enable_admin",
            *("trust_request_chat_template", "enable_auto_tool_choice"),
            *("exclude_tools_when_tool_choice_none", "inspector_show_text"),
        ):
            true_or_false(name, getattr(self, name))
        self._check_parsers()
        for name in ("api_key", "allowed_origins", "allowed_methods", "allowed_headers"):
            strings(name, getattr(self, name))
        self._check_paths()
        self._check_tls()
        if self.profile_dir is not None and not self.enable_admin:
            raise ConfigError(
                "profile_dir is set, but the routes that record a profile need enable_admin."
            )

    def _check_parsers(self) -> None:
        one_of("tool_call_parser", self.tool_call_parser, (None, *ToolCallParser.__args__))
        one_of("reasoning_parser", self.reasoning_parser, (None, *ReasoningParserName.__args__))
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            raise ConfigError(
                "enable_auto_tool_choice needs tool_call_parser, the format of this model's tool "
                f"calls: {' or '.join(ToolCallParser.__args__)}."
            )

    @property
    def is_tls(self) -> bool:
        """Whether the server uses HTTPS."""
        return self.ssl_certfile is not None

    @property
    def paths_without_access_log(self) -> frozenset[str]:
        """`disable_access_log_for_endpoints` as paths."""
        paths = (self.disable_access_log_for_endpoints or "").split(",")
        return frozenset(path.strip() for path in paths if path.strip())

    def _check_paths(self) -> None:
        path = self.root_path
        if path is not None and not (
            path.startswith("/") and not path.endswith("/") and path.isascii()
        ):
            raise ConfigError(
                f"root_path must begin with a slash and not end in one, as in /api, got "
                f"{self.root_path!r}."
            )
        folder = next((own for own in _OWN_FOLDERS if f"{path}/".startswith(f"{own}/")), None)
        if path in _OWN_PATHS or folder is not None:
            below = "" if folder is None else f", which is {folder} or below it"
            raise ConfigError(
                f"root_path must not be a path of the server, got {path!r}{below}; let the proxy "
                "add another prefix, as in /api/v1/models."
            )
        for path in sorted(self.paths_without_access_log):
            if not path.startswith("/"):
                raise ConfigError(
                    "disable_access_log_for_endpoints must be paths separated by commas, as in "
                    f"/health,/metrics, got {path!r}."
                )

    def _check_tls(self) -> None:
        if self.ssl_certfile is None:
            given = [n for n in ("ssl_keyfile", "ssl_ca_certs") if getattr(self, n) is not None]
            if given or self.ssl_cert_reqs:
                raise ConfigError(
                    f"{', '.join(given) or 'ssl_cert_reqs'} is set, but HTTPS needs ssl_certfile."
                )
        if type(self.ssl_cert_reqs) is not int or self.ssl_cert_reqs not in (0, 1, 2):
            raise ConfigError(f"ssl_cert_reqs must be 0, 1 or 2, got {self.ssl_cert_reqs!r}.")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ConfigError(
                f"ssl_cert_reqs={self.ssl_cert_reqs} needs ssl_ca_certs, the certificates of the "
                "authorities to trust."
            )
