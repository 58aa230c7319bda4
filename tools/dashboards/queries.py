"""The few shapes that all expressions have, with the dashboards' variables in them."""

from __future__ import annotations

from panels import Json, label_variable, source_variable

_INFO = "on (namespace, instance, worker)"
_WINDOW = "[$__rate_interval]"

VARIABLES: list[Json] = [
    source_variable(),
    label_variable("namespace", "Namespace", "label_values(moot_build_info, namespace)"),
    label_variable("model", "Model", 'label_values(moot_model_info{namespace=~"$namespace"}, model)'),
    label_variable("pool", "Pool", 'label_values(moot_proposal_tokens_total{namespace=~"$namespace"}, drafter)'),
]


def chosen(metric: str, **matchers: str) -> str:
    """A selector of the chosen namespaces. A matcher's value that begins with ~ is a regular expression."""
    pairs = {"namespace": "~$namespace", **matchers}.items()
    return f"{metric}{{{', '.join(_matcher(label, value) for label, value in pairs)}}}"


def _matcher(label: str, value: str) -> str:
    return f'{label}=~"{value[1:]}"' if value.startswith("~") else f'{label}="{value}"'


def of_model(vector: str) -> str:
    """What routers and verifiers of the chosen models say."""
    return f"{vector} and {_INFO} {chosen('moot_model_info', model='~$model')}"


def of_service(service: str, vector: str) -> str:
    """What one service says of a gauge that several have."""
    return f"{vector} and {_INFO} {chosen('moot_build_info', service=service)}"


def per_drafter(vector: str) -> str:
    """What processes of the chosen drafters say, with the label `drafter`."""
    info = chosen("moot_drafter_info", drafter="~$pool")
    return f"{vector} * on (namespace, instance) group_left (drafter) {info}"


def rate(metric: str, **matchers: str) -> str:
    return f"rate({chosen(metric, **matchers)}{_WINDOW})"


def increase(metric: str, **matchers: str) -> str:
    return f"increase({chosen(metric, **matchers)}{_WINDOW})"


def total(vector: str, by: str = "") -> str:
    return f"sum by ({by}) ({vector})" if by else f"sum({vector})"


def model_rate(metric: str, by: str = "", **matchers: str) -> str:
    """Per second, over the chosen models."""
    return total(of_model(rate(metric, **matchers)), by)


def mean(histogram: str, by: str = "") -> str:
    return f"{model_rate(f'{histogram}_sum', by=by)} / {model_rate(f'{histogram}_count', by=by)}"


def quantile(share: float, histogram: str, by: str = "") -> str:
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, {model_rate(f'{histogram}_bucket', by=labels)})"


def quantiles(histogram: str, *shares: float) -> dict[str, str]:
    """Expression to legend."""
    return {quantile(share, histogram): f"p{share * 100:g}" for share in shares}


GAIN = f"{model_rate('moot_plain_decoding_seconds_total')} / {model_rate('moot_round_duration_seconds_sum')}"
"""Seconds that plain decoding would have taken, of those that the rounds took."""
CORES = total(rate("moot_process_cpu_seconds_total"), by="instance")
"""In use, by process."""
