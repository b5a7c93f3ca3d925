#!/bin/sh
# Runs the checks of real clients, which are too heavy for the normal test suite.
#
#   tests/clients/run.sh [SCRIPT...]        SCRIPT as in check_openai.py; all if left out
#
# Each client is installed from the package index into an environment of its own below a temporary
# folder. $PYTHON (default: python3) must have paxkv; it runs a server of the demo model on a free
# port of 127.0.0.1, which ends with the script.
set -eu
cd "$(dirname "$0")/../.."
python="${PYTHON:-python3}"
work="$(mktemp -d)"
server=""
chosen=" $* "

stop() {
    if [ -n "$server" ]; then
        kill "$server" 2>/dev/null || true
        wait "$server" 2>/dev/null || true
        server=""
    fi
}
trap 'stop; rm -rf "$work"' EXIT
trap 'exit 130' INT TERM

# check SCRIPT PACKAGE FLAGS...: starts a server with the flags and runs the script against it.
check() {
    script="$1" package="$2"
    shift 2
    case "$chosen" in
    "  " | *" $script "*) ;;
    *) return 0 ;;
    esac
    "$python" -m venv "$work/$package"
    "$work/$package/bin/python" -m pip install --quiet "$package"
    "$python" -m paxkv.serve --port 0 "$@" >"$work/server.out" 2>"$work/server.err" &
    server=$!
    until grep -q " is ready at " "$work/server.out"; do
        if ! kill -0 "$server" 2>/dev/null; then
            cat "$work/server.err"
            exit 1
        fi
        sleep 1
    done
    url="$(sed -n 's|.* is ready at \(http://[^/]*\).*|\1|p' "$work/server.out")"
    "$work/$package/bin/python" "tests/clients/$script" "$url"
    stop
}

# Clients of OpenAI's API: the same server for each, without spaces and fields that the small demo
# model would write until it is cut off.
check_openai_client() {
    check "$1" "$2" --api-key client-key --enable-auto-tool-choice --tool-call-parser hermes \
        --structured-outputs-config \
        '{"disable_any_whitespace": true, "disable_additional_properties": true}'
}

check check_anthropic.py anthropic --api-key client-key --max-waiting-requests 0 \
    --enable-auto-tool-choice --tool-call-parser hermes --reasoning-parser qwen3 \
    --structured-outputs-config '{"disable_any_whitespace": true}'
check check_anthropic_thinking.py anthropic --reasoning-parser deepseek_r1
check_openai_client check_openai.py openai
check_openai_client check_langchain.py langchain-openai
check_openai_client check_pydantic_ai.py "pydantic-ai-slim[openai]"
check_openai_client check_llama_index.py llama-index-llms-openai-like
check_openai_client check_llm.py llm
check_openai_client check_openai_agents.py openai-agents
check_openai_client check_haystack.py haystack-ai
check lm_eval_remote_tokenizer.py "lm_eval[api]" --enable-tokenizer-info-endpoint
check check_guidellm.py guidellm
