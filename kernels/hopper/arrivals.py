"""Arrive counts of a kernel's barriers in a phase, counted while the kernel is compiled.

Barriers are initialised before the roles are traced that arrive at them. A wrong arrive count hangs, or has a stage read
before it is there; here it fails the compile.
"""

import cutlass.cute as cute


class Arrivals:
    """Arrivals at barriers, counted while a kernel is compiled and compared with what its barriers wait for.

    counts: the arrive counts that barriers were initialised with, by name; barriers of all stages have one name. Every
    role begins with `begin`, so that its arrivals count for all of its warps; `check` comes after all roles.
    """

    def __init__(self, counts: dict[str, int]):
        self.counts = counts
        self.counted: dict[tuple[str, str], int] = {}
        self.begin("no role", 0)

    def begin(self, role: str, warps: int, groups: int = 1):
        """Begin counting for a role; groups: of the role's warps, which take turns at the work tiles."""
        self.role, self.warps, self.groups = role, warps, groups

    def count(self, name: str, arrivals: int, by: str | None = None):
        """Count the arrivals that a phase of `name` gets from the role, or from some of it; the maximum, where it
        depends on the tile."""
        key = name, by or self.role
        self.counted[key] = max(arrivals, self.counted.get(key, 0))

    def arrive(self, name: str, barriers, index=0, times=1, max_times: int | None = None, groups: int | None = None):
        """Let a thread of every warp of a group arrive at barriers[index], `times` at once: up to `max_times` if it
        varies.

        groups: where not those of the role, how many have a barrier each.
        """
        self.count(name, self.warps // (groups or self.groups) * (times if max_times is None else max_times))
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barriers + index, arrive_count=times)

    def check(self):
        for name, count in self.counts.items():
            by_role = {by: arrivals for (barrier, by), arrivals in self.counted.items() if barrier == name}
            if sum(by_role.values()) != count:
                raise ValueError(
                    f"barrier {name} is initialised for {count} arrivals in a phase, but gets {sum(by_role.values())}: "
                    f"{by_role}; correct the count, or the role that arrives"
                )
