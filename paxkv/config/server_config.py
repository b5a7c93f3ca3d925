"""Every setting of the HTTP server: frozen, checked once, with its help text."""

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

# An engine loads its libraries before it can say that it does something: seconds, or tens of them
# from a slow disk.
MIN_READY_TIMEOUT_S = 30.0
_OWN_PATHS = (
    *("/health", "/ping", "/load", "/metrics", "/version", "/openapi.json"),
    *("/tokenize", "/detokenize", "/reset_prefix_cache", "/explain_prefix_cache_miss"),
    *("/start_profile", "/stop_profile", "/tokenizer_info", "/server_info"),
)
# What other paths begin with: "/v1/chat" taken off "/v1/chat/completions" would leave one that is
# nothing's.
_OWN_FOLDERS = ("/v1", "/inspector")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP door."""

    host: str = setting("address to listen on", "127.0.0.1")
    port: int = setting("port to listen on; 0 picks a free one", 8000)
    root_path: str | None = setting(
        "path that a proxy has in front of all of ours, whether or not it takes it off", None
    )
    max_waiting_requests: int | None = setting(
        "requests that may wait for a place in the running batch; one more is answered with 503 "
        "and Retry-After at once. Each prompt, and each of its n completions, counts as one. "
        "Places are --max-num-seqs, or, while the engine has some waiting, as many as it runs. No "
        "limit if left out",
        None,
    )
    max_num_queued_reqs: int | None = setting(
        "requests that may run and wait together; one more is answered with 503 and Retry-After at "
        "once. Each prompt, and each of its n completions, counts as one. No limit if left out",
        None,
    )
    max_body_bytes: int = setting("largest request body, in bytes", 4 * 2**20)
    max_header_bytes: int = setting(
        "most bytes of a request's first line and headers",
        64 * 2**10,
        aliases=("--h11-max-incomplete-event-size",),
    )
    h11_max_header_count: int | None = setting(
        "most headers of a request; no limit besides --max-header-bytes if left out", None
    )
    max_connections: int | None = setting(
        "most open connections; one more is answered with 503 and closed. As many as the limit of "
        "open files allows if left out, up to 65,000",
        None,
    )
    request_timeout_s: float = setting(
        "seconds a client may take to send a whole request, or to take what was written for it, "
        "before it is dropped",
        15.0,
    )
    max_unread_bytes: int = setting(
        "bytes of streamed answers that may wait in memory for clients that read slowly, of all "
        "requests together; over it, the request with the most of them ends with an error. One "
        "request may have 32 MiB of them",
        256 * 2**20,
    )
    shutdown_timeout_s: float = setting(
        "seconds that running requests may take to finish after SIGTERM",
        30.0,
        aliases=("--shutdown-timeout",),
    )
    max_engine_restarts: int = setting(
        "times in a row that an engine process that died is started again, before the server ends "
        "with exit code 1; 0 ends it as soon as its engine dies",
        3,
    )
    engine_restart_window_s: float = setting(
        "seconds that an engine must have served for its restarts to be forgiven", 600.0
    )
    engine_ready_timeout_s: float = setting(
        "seconds that an engine process that starts may do nothing, neither compute nor read; then "
        "it is killed. However long it computes does not matter. At least 30; 0 is no limit",
        600.0,
    )
    max_step_seconds: float = setting(
        "seconds without a completed step, while requests wait, after which GET /health answers "
        "503 with the reason. A step computes at most --max-num-batched-tokens tokens, so a long "
        "prompt takes many steps. 0 is no limit",
        120.0,
    )
    execute_model_timeout_s: float = setting(
        "seconds that a step of the model may take; then the engine process is killed and started "
        "again, as if it had died. 0 is no limit",
        300.0,
    )
    api_key: tuple[str, ...] = setting(
        "keys, any of which a client must send as `Authorization: Bearer KEY` to use what lies "
        "under /v1 and the admin routes. If left out, the environment variable PAXKV_API_KEY has "
        "them, with commas between several; if that has none, VLLM_API_KEY likewise. Other users "
        "of the machine can read flags, not variables",
        (),
        environment=API_KEY_VARIABLES,
        is_secret=True,
    )
    ssl_keyfile: str | None = setting("private key, for HTTPS", None)
    ssl_certfile: str | None = setting("certificate, for HTTPS", None)
    ssl_ca_certs: str | None = setting(
        "certificates of who may sign a client's; see --ssl-cert-reqs", None
    )
    ssl_cert_reqs: int = setting(
        "whether a client must show a certificate: 0 no, 1 it may, 2 it must", 0
    )
    allowed_origins: tuple[str, ...] = setting(
        "web pages' origins that may use the server from a browser, as in '[\"https://a.org\"]'; "
        '["*"] is all of them, and none if left out',
        (),
        is_json=True,
    )
    allowed_methods: tuple[str, ...] = setting("methods that they may use", ("*",), is_json=True)
    allowed_headers: tuple[str, ...] = setting("headers that they may send", ("*",), is_json=True)
    allow_credentials: bool = setting("let them send cookies and the like", False)
    disable_fastapi_docs: bool = setting(
        "do not offer GET /openapi.json, the description of the API", False
    )
    enable_tokenizer_info_endpoint: bool = setting(
        "offer GET /tokenizer_info: the tokenizer's configuration and the chat template", False
    )
    disable_uvicorn_access_log: bool = setting("log no line a request", False)
    disable_access_log_for_endpoints: str | None = setting(
        "paths that get none, with commas between: /health,/metrics,/ping", None
    )
    disable_log_stats: bool = setting(
        "log no line on throughput, requests and cache every --log-stats-interval-s; /metrics has "
        "its numbers all the same",
        False,
    )
    log_stats_interval_s: float = setting(
        "seconds between two such lines; there is none where nothing ran meanwhile", 10.0
    )
    response_store_bytes: int = setting(
        "bytes of memory for answers of /v1/responses, with their conversations: for "
        "previous_response_id, background and GET. The least recently used are dropped; 0 stores "
        "none",
        64 * 2**20,
    )
    enable_admin: bool = setting(
        "offer POST /reset_prefix_cache, POST /start_profile, POST /stop_profile, "
        "GET /explain_prefix_cache_miss and GET /server_info: for operators, and not for clients "
        "that may only generate",
        False,
    )
    profile_dir: str | None = setting(
        "folder for what POST /start_profile records, for TensorBoard or XProf", None
    )
    enable_inspector: bool | None = setting(
        "serve the page /inspector, which shows every request and the KV cache at work; if left "
        "out, on loopback addresses only",
        None,
    )
    inspector_show_text: bool = setting(
        "let the inspector show what is in a block as text: prompts and answers of all clients",
        False,
    )
    inspector_max_trace_bytes: int = setting(
        "largest trace that the inspector replays for a page, in bytes", 256 * 2**20
    )
    enable_force_include_usage: bool = setting(
        "end every stream of completions and chats with the token counts, as if the request had "
        "stream_options with include_usage",
        False,
    )
    stream_interval: int = setting(
        "least tokens in an event of a stream, except the first and the last one; requests may "
        "set their own",
        1,
    )
    default_chat_template_kwargs: ChatTemplateKwargs = setting(
        "variables of the chat template for chats whose chat_template_kwargs do not set them, as a "
        'JSON object: {"enable_thinking": false}',
        ChatTemplateKwargs(),
    )
    trust_request_chat_template: bool = setting(
        "let a request bring its own chat template, which is a program", False
    )
    enable_auto_tool_choice: bool = setting(
        "let the model decide whether to call tools; needs --tool-call-parser", False
    )
    tool_call_parser: ToolCallParser | None = setting(
        "how the model writes tool calls: hermes (Qwen too) or llama3_json", None
    )
    exclude_tools_when_tool_choice_none: bool = setting(
        'show the model no tools where tool_choice is "none"', False
    )
    reasoning_parser: ReasoningParserName | None = setting(
        "how the model writes what it thinks, which then stands apart from its answer: qwen3 or "
        "deepseek_r1",
        None,
    )
    structured_outputs_config: StructuredOutputsConfig = setting(
        "what all structured output has in common, as a JSON object with any of "
        "disable_any_whitespace, disable_additional_properties and enable_in_reasoning, true or "
        "false each",
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
                "enable_auto_tool_choice needs tool_call_parser, which says how this model writes "
                f"calls: {' or '.join(ToolCallParser.__args__)}."
            )

    @property
    def is_tls(self) -> bool:
        """Whether the server speaks HTTPS."""
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
                f"root_path must not be a path of our own, got {path!r}{below}; let the proxy add "
                "another, as in /api/v1/models."
            )
        for path in sorted(self.paths_without_access_log):
            if not path.startswith("/"):
                raise ConfigError(
                    "disable_access_log_for_endpoints must be paths with commas between, as in "
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
                f"ssl_cert_reqs={self.ssl_cert_reqs} needs ssl_ca_certs: whose certificates are "
                "to be believed."
            )
