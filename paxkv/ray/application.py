"""`app`: builds the Ray Serve application from its arguments."""

from collections.abc import Mapping

from ray import serve
from ray.serve import Application
from ray.serve.config import (
    AutoscalingConfig,
    AutoscalingContext,
    AutoscalingPolicy,
    RequestRouterConfig,
)

from paxkv.ray.engine_replica import EngineReplica
from paxkv.ray.ingress import Ingress
from paxkv.ray.replica_load import NEEDED_REPLICAS, wanted_replicas
from paxkv.ray.settings import RayConfig, RaySettings, read_settings

# The ingress mostly waits for replicas, so it reserves no processor core.
_INGRESS_CPUS = 0
_MAX_INGRESS_REQUESTS = 10_000
# Time between two health checks of a replica. After three failures, Ray Serve replaces the replica.
_HEALTH_PERIOD_S = 2.0
_HEALTH_TIMEOUT_S = 10.0
# Time for the engine to end, after its requests have ended or the drain timeout has passed.
_CLOSE_S = 20.0


def app(arguments: Mapping[str, object]) -> Application:
    """Builds the application: `serve run paxkv.ray:app model=org/name num_replicas=2`.

    Raises:
        ConfigError: See `read_settings`.
    """
    settings = read_settings(arguments)
    engines = _engines(settings)
    ingress = serve.deployment(
        Ingress,
        name="ingress",
        num_replicas=settings.ray.num_ingresses,
        max_ongoing_requests=_MAX_INGRESS_REQUESTS,
        ray_actor_options={"num_cpus": _INGRESS_CPUS},
        graceful_shutdown_timeout_s=settings.server.shutdown_timeout_s,
    )
    return ingress.bind(engines, settings.server.max_body_bytes, settings.ray.accept_timeout_s)


def scale_on_requests(context: AutoscalingContext) -> tuple[int, dict[str, object]]:
    """The policy of Ray Serve's autoscaler: as many replicas as the requests need."""
    needed = (context.aggregated_metrics or {}).get(NEEDED_REPLICAS, {})
    return wanted_replicas(sum(needed.values())), {}


def _engines(settings: RaySettings) -> Application:
    config = settings.ray
    engines = serve.deployment(
        EngineReplica,
        name="engines",
        max_ongoing_requests=config.max_ongoing_requests,
        ray_actor_options=_actor_options(config),
        health_check_period_s=_HEALTH_PERIOD_S,
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=settings.server.shutdown_timeout_s + _CLOSE_S,
        request_router_config=RequestRouterConfig(request_router_class=config.request_router),
        **_num_replicas(config),
    )
    return engines.bind(settings.engine, settings.server)


def _num_replicas(config: RayConfig) -> dict[str, object]:
    if config.max_replicas is None:
        return {"num_replicas": config.num_replicas}
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=config.min_replicas,
            max_replicas=config.max_replicas,
            policy=AutoscalingPolicy(policy_function="paxkv.ray.application:scale_on_requests"),
        )
    }


def _actor_options(config: RayConfig) -> dict[str, object]:
    options: dict[str, object] = {"num_cpus": config.num_cpus}
    if config.num_gpus:
        options["num_gpus"] = config.num_gpus
    else:
        # The number of threads with which JAX computes on the CPU. By default, JAX uses all cores.
        options["runtime_env"] = {"env_vars": {"NPROC": str(config.num_cpus)}}
    return options
