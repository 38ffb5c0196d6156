"""What this peer says of itself: its profile and its bases' claims, in the DHT and as news."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Literal

from dht_config.keys import manifest_key, profiles_key, run_manifest_key, states_key
from dht_config.news import PeerNews, sign_news
from dht_config.records import FragmentClaim, PeerProfile, SwarmState, software_version
from dht_config.validators import PEER_RECORD_LIFETIME_SECONDS
from peers.cadence import Cadence
from peers.context import RunContext
from peers.life import State
from peers.messages import mask_of
from peers.news import Newsroom

logger = logging.getLogger(__name__)

RECORD_SECONDS = 30.0
"""How long a record of ours stands; a silent peer is forgotten after it."""
MANIFEST_SECONDS = 600.0

Status = Literal["syncing", "training", "serving", "leaving"]
ANNOUNCED: Mapping[State, Status] = {"training": "training", "serving": "serving", "leaving": "leaving"}
"""What our record says in these states; nobody counts on us in the others."""


class OwnRecords:
    """This peer's records, signed anew whenever somebody is to hear of them."""

    def __init__(self, run: RunContext, newsroom: Newsroom, cadence: Cadence) -> None:
        self._run, self._newsroom, self._cadence = run, newsroom, cadence
        self._joined_at = run.clock.now()
        self._last_expiration = 0.0
        self.said_goodbye = False
        """Whether they say that we leave: whoever reads that goes on without us."""
        self.samples_per_second = 0.0
        """As last told: what the others reckon with."""

    @property
    def status(self) -> Status:
        """What our record says that we do."""
        return ANNOUNCED.get(self._run.life.state, "syncing")

    async def publish_manifest(self) -> None:
        run_id, payload = self._run.settings.run_id, self._run.signed_manifest.to_payload()
        until = self._run.clock.now() + MANIFEST_SECONDS
        await asyncio.gather(
            *(
                self._run.node.store(key, payload, until, subkey=run_id)
                for key in (run_manifest_key(run_id), manifest_key())
            )
        )

    async def publish(self) -> None:
        """Store our profile and our bases' claims in the DHT. What others are told of us from now on is the same."""
        news = self.tell()
        run_id, own = self._run.settings.run_id, self._run.own_id
        stores = [self._run.node.store(profiles_key(run_id), news.profile.to_payload(), news.expires, subkey=own)]
        if news.state is not None:
            stores.append(self._run.node.store(states_key(run_id), news.state.to_payload(), news.expires, subkey=own))
        if not all(await asyncio.gather(*stores)):
            logger.debug("The DHT refused a record of ours")

    def tell(self) -> PeerNews:
        """Make news of our profile, with what we are doing, and our bases' claims, for whoever asks."""
        status = self.status
        self.said_goodbye = status == "leaving"
        training, progress = self._run.training.begun, self._run.training.progress
        self.samples_per_second = progress.samples_per_second or (training.samples_per_second if training else 0.0)
        profile = PeerProfile(
            software_version=software_version(),
            status=status,
            samples_per_second=self.samples_per_second,
            processed_samples=progress.samples,
            credited_samples=progress.credited_samples,
            micro_batch=training.micro_batch if training else 0,
            device=training.device if training else "",
            addresses=tuple(self._run.addresses[:16]),
            joined_at=self._joined_at,
            restart=self._run.settings.restart,
            cadence=self._cadence.announced,
            trains=mask_of(set(progress.trained), len(self._run.fragments)) if progress.trained is not None else b"",
        )
        state = None
        if all(fragment.version >= 0 for fragment in self._run.fragments):
            state = SwarmState(
                fragments=tuple(
                    FragmentClaim(version=claim.version, digest=claim.digest, total_samples=claim.total_samples)
                    for claim in (fragment.claim for fragment in self._run.fragments)
                )
            )
        news = PeerNews(
            peer_id=self._run.own_id, expires=self._expiration(RECORD_SECONDS), profile=profile, state=state
        )
        self._newsroom.announce(news, sign_news(self._run.settings.identity, news, self._run.settings.run_id))
        return news

    def _expiration(self, seconds: float) -> float:
        """Later than any expiration given before: the DHT keeps the record that expires last.

        Except what nobody accepted, since our clock was far ahead when it was given.
        """
        now = self._run.clock.now()
        before = self._last_expiration if self._last_expiration < now + PEER_RECORD_LIFETIME_SECONDS else 0.0
        self._last_expiration = max(now + seconds, before + 0.001)
        return self._last_expiration
