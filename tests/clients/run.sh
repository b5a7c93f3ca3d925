#!/bin/sh
# Runs the checks of real clients, which are too heavy for the normal test suite.
#
#   tests/clients/run.sh
#
# Each client is installed from the package index into an environment of its own below a temporary
# folder. $PYTHON (default: python3) must have paxkv; it runs a server of the demo model on a free
# port of 127.0.0.1, which ends with the script.
set -eu
cd "$(dirname "$0")/../.."
python="${PYTHON:-python3}"
work="$(mktemp -d)"
server=""

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

check check_anthropic.py anthropic --api-key client-key --max-waiting-requests 0 \
    --enable-auto-tool-choice --tool-call-parser hermes --reasoning-parser qwen3 \
    --structured-outputs-config '{"disable_any_whitespace": true}'
check check_anthropic_thinking.py anthropic --reasoning-parser deepseek_r1
