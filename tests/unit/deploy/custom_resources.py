"""Shapes of the custom resources that the manifests use: kubernetes-validate has Kubernetes' own kinds only.

Written from the resources' documentation, no wider than what the manifests need: a field that is not here is
refused.
"""

from typing import Any

Schema = dict[str, Any]

STRING: Schema = {"type": "string", "minLength": 1}
COUNT: Schema = {"type": "integer", "minimum": 0}
LABELS: Schema = {"type": "object", "additionalProperties": STRING}


def shape(required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    """An object with these fields and no others."""
    return {
        "type": "object",
        "required": list(required),
        "properties": required | (optional or {}),
        "additionalProperties": False,
    }


def resource(api_version: str, kind: str, spec: Schema) -> Schema:
    metadata = shape({"name": STRING, "namespace": STRING}, {"labels": LABELS, "annotations": LABELS})
    return shape(
        {"apiVersion": {"const": api_version}, "kind": {"const": kind}, "metadata": metadata, "spec": spec}
    )


SERVICE_MONITOR = resource(
    "monitoring.coreos.com/v1",
    "ServiceMonitor",
    shape(
        {
            "selector": shape({"matchLabels": LABELS}),
            "endpoints": {
                "type": "array",
                "minItems": 1,
                "items": shape(
                    {"port": STRING},
                    {
                        "path": {"type": "string", "pattern": "^/"},
                        "authorization": shape({"credentials": shape({"name": STRING, "key": STRING})}),
                        "interval": {"type": "string", "pattern": r"^\d+(ms|s|m)$"},
                        "scrapeTimeout": {"type": "string", "pattern": r"^\d+(ms|s|m)$"},
                    },
                ),
            },
        },
        {"jobLabel": STRING},
    ),
)

LEADER_WORKER_SET = resource(
    "leaderworkerset.x-k8s.io/v1",
    "LeaderWorkerSet",
    shape(
        {
            "replicas": COUNT,
            "leaderWorkerTemplate": shape(
                {
                    "size": {"type": "integer", "minimum": 1},
                    # A PodTemplateSpec; the tests hand it to kubernetes-validate as a Pod.
                    "workerTemplate": shape({"metadata": {"type": "object"}, "spec": {"type": "object"}}),
                },
                {"restartPolicy": {"enum": ["Default", "RecreateGroupOnPodRestart", "None"]}},
            ),
        },
        {
            "networkConfig": shape({"subdomainPolicy": {"enum": ["Shared", "UniquePerReplica"]}}),
            "startupPolicy": {"enum": ["LeaderCreated", "LeaderReady"]},
        },
    ),
)

SCALED_OBJECT = resource(
    "keda.sh/v1alpha1",
    "ScaledObject",
    shape(
        {
            "scaleTargetRef": shape({"apiVersion": STRING, "kind": STRING, "name": STRING}),
            "minReplicaCount": COUNT,
            "maxReplicaCount": {"type": "integer", "minimum": 1},
            "triggers": {
                "type": "array",
                "minItems": 1,
                "items": shape(
                    {
                        "type": {"const": "prometheus"},
                        "metricType": {"enum": ["AverageValue", "Value"]},
                        # Of this trigger all values are strings, numbers too.
                        "metadata": shape(
                            {
                                "serverAddress": {"type": "string", "pattern": "^http"},
                                "query": STRING,
                                "threshold": {"type": "string", "pattern": r"^[\d.]+$"},
                            },
                            {"activationThreshold": {"type": "string", "pattern": r"^[\d.]+$"}},
                        ),
                    }
                ),
            },
        },
        {
            "pollingInterval": COUNT,
            "cooldownPeriod": COUNT,
            # The field is a HorizontalPodAutoscaler's own behavior.
            "advanced": shape({"horizontalPodAutoscalerConfig": shape({"behavior": {"type": "object"}})}),
        },
    ),
)

SCHEMAS = {
    "ServiceMonitor": SERVICE_MONITOR,
    "LeaderWorkerSet": LEADER_WORKER_SET,
    "ScaledObject": SCALED_OBJECT,
}
