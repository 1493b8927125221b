"""All routing policies by the name that --routing-policy has for each."""

from proxy.config import PolicyName
from proxy.routing.least_loaded import LeastLoaded
from proxy.routing.lockstep import Lockstep
from proxy.routing.policy import RoutingPolicy
from proxy.routing.prefix import Prefix
from proxy.routing.round_robin import RoundRobin


def policy(name: PolicyName) -> RoutingPolicy:
    """A new one: it may keep what it chose last."""
    match name:
        case "lockstep":
            return Lockstep()
        case "prefix":
            return Prefix()
        case "least_loaded":
            return LeastLoaded()
        case "round_robin":
            return RoundRobin()
