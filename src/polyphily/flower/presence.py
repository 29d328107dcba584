"""Sites that are away: a dead one must not cost the full timeout in every round."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from polyphily.flower.joining import Policy, Transport


class Presence:
    """Counts the messages in a row that each site left unanswered.

    After `Policy.misses` of them a site counts as away. It is still asked, but the server waits for
    it only while it waits for others, and at least `Policy.grace` seconds. A site is back as soon
    as it answers. It also has the full time again once it has been disconnected and connects anew,
    as after a restart.

    Args:
        transport: knows who is connected.
        policy: of the run.
    """

    def __init__(self, transport: Transport, policy: Policy) -> None:
        self.transport, self.policy = transport, policy
        self.missed: dict[str, int] = {}
        self._disconnected: set[str] = set()

    def is_away(self, site: str) -> bool:
        return self.missed.get(site, 0) >= self.policy.misses

    def grace(self, sites: Collection[str], needed: int) -> dict[str, float]:
        """Return the sites that are away, with the seconds that each has at least.

        Nobody is hurried if fewer than `needed` sites would be left.
        """
        if any(map(self.is_away, sites)):
            online = self.transport.online()
            for site in filter(self.is_away, sites):
                if site not in online:
                    self._disconnected.add(site)
                elif site in self._disconnected:
                    self.note_answer(site)
        away = [site for site in sites if self.is_away(site)]
        enough = len(sites) - len(away) >= needed
        return dict.fromkeys(away, self.policy.grace) if enough else {}

    def note_answer(self, site: str) -> None:
        self.missed.pop(site, None)
        self._disconnected.discard(site)

    def note_silence(self, sites: Iterable[str]) -> None:
        for site in sites:
            self.missed[site] = self.missed.get(site, 0) + 1
