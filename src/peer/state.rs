//! What an endpoint knows: its connections, how packets find them, whom it has dialled.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use boring::hash::hmac_sha256;
use narad_shards::io::ring::Route;
use narad_shards::remote::{CallError, ConnectionId};
use narad_shards::rt::{self, Instant};
use quiche::{Header, RecvInfo, Type};

use super::admission::{Admission, Verdict, CID_BYTES};
use super::intake::Intake;
use super::link::{Event, Link};
use super::metrics::{LinkFigures, PeerMetrics};
use super::outbox::{Batch, Outbox};
use super::tls::Tls;
use super::PeerSettings;

const BACKOFF_MIN: Duration = Duration::from_millis(250);
const BACKOFF_MAX: Duration = Duration::from_secs(2);
/// Connections that one shard of a node, or its control thread, has to this endpoint; the newest stay. It needs one, and the
/// control thread another one for snapshots; what is left of a former process may be taken for alive for a while.
const CONNECTIONS_PER_SPEAKER_MAX: usize = 4;
/// Set in the first byte of packets of a handshake (RFC 9000, 17.2).
const LONG_HEADER: u8 = 0x80;

/// Somebody whom this endpoint has dialled.
struct Dialled {
    link: Option<ConnectionId>,
    failures: u32,
    /// Until then requests fail at once, for this reason.
    not_before: Instant,
    reason: String,
}

pub(super) struct State {
    pub settings: PeerSettings,
    pub tls: Tls,
    admission: Admission,
    reset_key: Vec<u8>,
    local: SocketAddr,
    links: BTreeMap<ConnectionId, Link>,
    by_cid: BTreeMap<Vec<u8>, ConnectionId>,
    dialled: BTreeMap<SocketAddr, Dialled>,
    /// Something has happened to these.
    touched: BTreeSet<ConnectionId>,
    /// These may have packets to send, in turn.
    talking: VecDeque<ConnectionId>,
    pub outbox: Outbox,
    intake: Intake,
    pub metrics: PeerMetrics,
    /// Wrong proofs, and frames without room.
    guesses: Refusals,
    unfitting: Refusals,
}

/// What is worth a line, and not one for each time.
#[derive(Default)]
struct Refusals {
    told_at: Option<Instant>,
    untold: u64,
    /// Whom it has happened to last: it may be told when it is the turn of another.
    last: Option<SocketAddr>,
}

impl Refusals {
    const TELL_EVERY: Duration = Duration::from_secs(5);

    /// `peer` was refused so often, perhaps never. Returns how often it has happened and to whom last, when that is to
    /// be told now.
    fn note(&mut self, peer: SocketAddr, refused: u64, now: Instant) -> Option<(u64, SocketAddr)> {
        if refused > 0 {
            self.untold += refused;
            self.last = Some(peer);
        }
        if self.told_at.is_some_and(|told| now < told + Self::TELL_EVERY) {
            return None;
        }
        let last = self.last.take()?;
        self.told_at = Some(now);
        Some((std::mem::take(&mut self.untold), last))
    }
}

fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    for chunk in bytes.chunks_mut(8) {
        chunk.copy_from_slice(&rt::random_u64().to_le_bytes()[..chunk.len()]);
    }
    bytes
}

fn next_id() -> ConnectionId {
    // Over all endpoints of the process: an id says which connection is meant wherever it turns up.
    static NEXT: AtomicU64 = AtomicU64::new(1);
    ConnectionId(NEXT.fetch_add(1, Ordering::Relaxed))
}

impl State {
    pub fn new(settings: PeerSettings, local: SocketAddr) -> Result<State, String> {
        let tls = Tls::new(&settings)?;
        let secret = settings.secret.as_ref().map_or_else(|| random::<32>().to_vec(), |secret| secret.to_vec());
        // Of the secret, so that a process that was started again can still end the connections of the one before. And of
        // who and where this endpoint is: a token that another one gives away for the same id ends nothing here.
        let scope = format!("narad peer stateless reset of {} at {local}", settings.node);
        let reset_key = hmac_sha256(&secret, scope.as_bytes()).map_err(|error| error.to_string())?;
        Ok(State {
            outbox: Outbox::new(settings.offload),
            intake: Intake::new(settings.incoming_bytes_max),
            settings,
            tls,
            admission: Admission::new(random()),
            reset_key: reset_key.to_vec(),
            local,
            links: BTreeMap::new(),
            by_cid: BTreeMap::new(),
            dialled: BTreeMap::new(),
            touched: BTreeSet::new(),
            talking: VecDeque::new(),
            metrics: PeerMetrics::default(),
            guesses: Refusals::default(),
            unfitting: Refusals::default(),
        })
    }

    pub fn link(&mut self, id: ConnectionId) -> Option<&mut Link> {
        let link = self.links.get_mut(&id)?;
        self.touched.insert(id);
        Some(link)
    }

    /// The connection that was dialled to `to`, if it is up.
    pub fn open_to(&self, to: SocketAddr) -> Option<&Link> {
        let id = self.dialled.get(&to)?.link?;
        self.links.get(&id).filter(|link| link.is_open())
    }

    /// The connection for requests to `to`; dialled now if there is none, unless the last attempt has just failed.
    pub fn link_to(&mut self, to: SocketAddr) -> Result<&mut Link, CallError> {
        let now = rt::now();
        let known = self.dialled.entry(to).or_insert_with(|| Dialled {
            link: None,
            failures: 0,
            not_before: Instant(0),
            reason: String::new(),
        });
        let current = known.link.filter(|id| self.links.get(id).is_some_and(|link| !link.has_ended()));
        let id = match current {
            Some(id) => id,
            None if known.failures > 0 && now < known.not_before => {
                return Err(CallError::NotSent(format!("{to} could not be reached a moment ago: {}", known.reason)));
            }
            None => self.dial(to, now)?,
        };
        self.link(id).ok_or_else(|| CallError::NotSent("the connection has just ended".to_owned()))
    }

    fn dial(&mut self, to: SocketAddr, now: Instant) -> Result<ConnectionId, CallError> {
        let cid = random::<CID_BYTES>();
        let quic = self.tls.dial(&cid, self.local, to);
        let quic = quic.map_err(|error| CallError::NotSent(format!("cannot dial {to}: {error:?}")))?;
        self.metrics.dials += 1;
        let id = self.insert(Route::from(to), true, quic, now, vec![cid.to_vec()]);
        if let Some(known) = self.dialled.get_mut(&to) {
            known.link = Some(id);
        }
        Ok(id)
    }

    fn insert(
        &mut self,
        route: Route,
        dialled: bool,
        quic: super::buffers::Quic,
        now: Instant,
        cids: Vec<Vec<u8>>,
    ) -> ConnectionId {
        let id = next_id();
        let keep_alive = self.settings.keep_alive.then_some(self.settings.idle_timeout / 3);
        let (secret, intake) = (self.settings.secret.clone(), self.intake.clone());
        let mut link = Link::new(id, route, dialled, quic, secret, intake, keep_alive, now);
        self.by_cid.extend(cids.iter().map(|cid| (cid.clone(), id)));
        link.cids = cids;
        self.links.insert(id, link);
        self.touched.insert(id);
        id
    }

    // Packets.

    /// `at`: the address of this machine that it came to, where that is known.
    pub fn receive(&mut self, from: SocketAddr, at: Option<IpAddr>, datagram: &mut [u8], now: Instant) {
        self.metrics.datagrams_received += 1;
        self.metrics.bytes_received += datagram.len() as u64;
        // Nearly all that comes has a short header and a known id, which stands behind its first byte.
        let short = datagram.first().is_some_and(|first| first & LONG_HEADER == 0);
        let cid = datagram.get(1..=CID_BYTES).filter(|_| short);
        let id = match cid.and_then(|cid| self.by_cid.get(cid)) {
            Some(id) => Some(*id),
            None => self.recognise(Route { to: from, from: at }, datagram, now),
        };
        // Packets from another address than the peer's are not the peer's (E54).
        let Some(link) = id.and_then(|id| self.links.get_mut(&id)).filter(|link| link.peer == from) else { return };
        // An error that matters closes the connection; others are noise from the network.
        let _ = link.quic.recv(datagram, RecvInfo { from, to: self.local });
        self.touched.insert(link.id);
    }

    /// The connection that a datagram belongs to, by all that its header says; a new one, if it asks for one.
    fn recognise(&mut self, route: Route, datagram: &mut [u8], now: Instant) -> Option<ConnectionId> {
        let header = Header::from_slice(datagram, CID_BYTES).ok()?;
        match self.by_cid.get(header.dcid.as_ref()).copied() {
            Some(id) => Some(id),
            None if header.ty == Type::Initial => self.admit(&header, route, datagram.len(), now),
            None if header.ty == Type::Short => match self.dialled.get(&route.to).and_then(|known| known.link) {
                // It may be the reset of a connection that the peer has forgotten: only quiche can tell.
                Some(id) => Some(id),
                None => {
                    self.reset(&header, route, datagram.len());
                    None
                }
            },
            None => None,
        }
    }

    fn admit(&mut self, header: &Header<'_>, route: Route, bytes: usize, now: Instant) -> Option<ConnectionId> {
        if bytes < quiche::MIN_CLIENT_INITIAL_LEN || !quiche::version_is_supported(header.version) {
            return None;
        }
        let unproven = self.links.values().filter(|link| link.is_unproven()).count();
        let token = header.token.as_deref().unwrap_or_default();
        let original = match self.admission.judge(unproven, route.to, token, &header.dcid, now) {
            Verdict::Accept => None,
            Verdict::AcceptVerified(original) => Some(original),
            Verdict::Retry => {
                self.retry(header, route, now);
                return None;
            }
            Verdict::Ignore => {
                self.metrics.strangers_refused += 1;
                return None;
            }
        };
        // After a Retry the dialler uses the id that was chosen for it then.
        let cid = if original.is_some() { header.dcid.to_vec() } else { random::<CID_BYTES>().to_vec() };
        let token = self.reset_token(&cid)?;
        let quic = self.tls.accept(&cid, original.as_deref(), token, self.local, route.to).ok()?;
        self.metrics.accepts += 1;
        // The dialler's first packets go to an id of its own choice.
        Some(self.insert(route, false, quic, now, vec![cid, header.dcid.to_vec()]))
    }

    fn retry(&mut self, header: &Header<'_>, route: Route, now: Instant) {
        if !self.outbox.may_answer() {
            self.metrics.strangers_refused += 1;
            return;
        }
        let chosen = random::<CID_BYTES>();
        let Some(token) = self.admission.token(route.to, &header.dcid, &chosen, now) else { return };
        let chosen = quiche::ConnectionId::from_ref(&chosen);
        let mut packet = vec![0; super::DATAGRAM_BYTES_MIN];
        let written = quiche::retry(&header.scid, &header.dcid, &chosen, &token, header.version, &mut packet);
        if let Ok(bytes) = written {
            packet.truncate(bytes);
            self.outbox.answer(route, packet);
            self.metrics.retries += 1;
        }
    }

    fn reset_token(&self, cid: &[u8]) -> Option<u128> {
        let code = hmac_sha256(&self.reset_key, cid).ok()?;
        code.first_chunk().map(|token| u128::from_be_bytes(*token))
    }

    /// Tells a peer that this process knows nothing of a connection: it was started again. Only whoever knows the secret can say it.
    fn reset(&mut self, header: &Header<'_>, route: Route, bytes: usize) {
        // Shorter than what it answers, or two endpoints could go on for ever.
        const RESET_BYTES: usize = 42;
        if bytes <= RESET_BYTES || !self.outbox.may_answer() {
            self.metrics.strangers_refused += 1;
            return;
        }
        let Some(token) = self.reset_token(&header.dcid) else { return };
        let mut packet = random::<RESET_BYTES>();
        packet[0] = 0x40 | (packet[0] & 0x3f);
        packet[RESET_BYTES - 16..].copy_from_slice(&token.to_be_bytes());
        self.outbox.answer(route, packet.to_vec());
        self.metrics.resets_sent += 1;
    }

    /// The next thing to send.
    pub fn next_batch(&mut self, now: Instant) -> Option<Batch> {
        while self.outbox.is_empty() {
            let Some(id) = self.talking.pop_front() else { break };
            let Some(link) = self.links.get_mut(&id) else { continue };
            let ended = link.has_ended();
            if link.transmit(&mut self.outbox, now) {
                self.talking.push_back(id);
            }
            if link.has_ended() != ended {
                self.touched.insert(id);
            }
        }
        let idle = self.outbox.is_empty();
        let batch = self.outbox.next_answer(idle).or_else(|| self.outbox.next())?;
        self.metrics.sends += 1;
        self.metrics.bytes_sent += batch.data.len() as u64;
        let segment_bytes = batch.segment_bytes.map_or(batch.data.len(), usize::from);
        self.metrics.datagrams_sent += batch.data.len().div_ceil(segment_bytes.max(1)) as u64;
        Some(batch)
    }

    // What has become of connections.

    /// Goes through the connections that something has happened to and, if `look`, those that have something due. What
    /// there is to do outside is added to `events`.
    pub fn advance(&mut self, now: Instant, look: bool, events: &mut Vec<Event>) -> bool {
        let touched = std::mem::take(&mut self.touched);
        for id in &touched {
            let Some(link) = self.links.get_mut(id) else { continue };
            link.advance(now);
            events.append(&mut link.events);
            let peer = link.peer;
            let refused = std::mem::take(&mut link.tally.proofs_refused);
            self.metrics.proofs_refused += refused;
            if let Some((times, peer)) = self.guesses.note(peer, refused, now) {
                tracing::warn!(component = "audit", %peer, times, "cluster stream rejected: invalid auth");
            }
            let refused = std::mem::take(&mut link.tally.frames_refused);
            self.metrics.frames_refused += refused;
            if let Some((times, peer)) = self.unfitting.note(peer, refused, now) {
                let (bytes, bytes_max) = (self.intake.bytes(), self.settings.incoming_bytes_max);
                tracing::warn!(%peer, times, bytes, bytes_max, "frames of a peer are refused: too much is on its way at a time");
            }
            self.metrics.pings += std::mem::take(&mut link.tally.pings);
            self.metrics.silent += std::mem::take(&mut link.tally.silent);
            let (ended, closed) = (link.has_ended(), link.quic.is_closed());
            if ended {
                self.account_end(*id, now);
            }
            if closed {
                self.remove(*id);
            } else if !self.talking.contains(id) {
                self.talking.push_back(*id);
            }
        }
        // Afterwards, because what has arrived may have made it void.
        for (id, link) in self.links.iter_mut().filter(|_| look) {
            if link.tick(now) {
                self.touched.insert(*id);
            }
        }
        !touched.is_empty() || !self.touched.is_empty()
    }

    /// A dialled connection that has ended is used no more; one that was never up is a failed dial.
    fn account_end(&mut self, id: ConnectionId, now: Instant) {
        let Some(link) = self.links.get(&id).filter(|link| link.is_dialled()) else { return };
        let Some(known) = self.dialled.get_mut(&link.peer).filter(|known| known.link == Some(id)) else { return };
        known.link = None;
        if !link.was_open() {
            self.metrics.dials_failed += 1;
            let backoff = BACKOFF_MIN * (1 << known.failures.min(3));
            known.failures += 1;
            known.not_before = now + backoff.min(BACKOFF_MAX);
            known.reason = link.ended_because.clone();
        }
    }

    /// It is up.
    pub fn introduced(&mut self, id: ConnectionId, verdict: Result<(), String>, now: Instant) {
        let Some(link) = self.link(id) else { return };
        link.introduced(verdict, now);
        if !link.is_open() {
            return;
        }
        let (peer, dialled) = (link.peer, link.is_dialled());
        if dialled {
            if let Some(known) = self.dialled.get_mut(&peer) {
                known.failures = 0;
            }
            return;
        }
        let speaker = link.speaker();
        let accepted = |link: &&Link| !link.is_dialled() && link.is_open() && link.id != id;
        // An endpoint dials again only when its former connection is lost to it: nobody waits for answers there.
        let mut former: Vec<ConnectionId> =
            self.links.values().filter(accepted).filter(|link| link.peer == peer).map(|link| link.id).collect();
        // The same shard of the same node from other addresses: former processes of it, or more than anybody needs.
        let others = self.links.values().filter(accepted).filter(|link| link.peer != peer && link.speaker() == speaker);
        let others: Vec<ConnectionId> = others.map(|link| link.id).collect();
        former.extend(&others[..others.len().saturating_sub(CONNECTIONS_PER_SPEAKER_MAX - 1)]);
        for id in former {
            if let Some(link) = self.link(id) {
                link.replace();
            }
        }
    }

    fn remove(&mut self, id: ConnectionId) {
        let Some(link) = self.links.remove(&id) else { return };
        for cid in &link.cids {
            self.by_cid.remove(cid);
        }
        add_stats(&mut self.metrics, &link);
    }

    pub fn next_timer(&self) -> Option<Instant> {
        self.links.values().filter_map(Link::next_timer).min()
    }

    /// Ends every connection.
    pub fn stop(&mut self) {
        for (id, link) in &mut self.links {
            link.stop();
            self.touched.insert(*id);
        }
    }

    pub fn links(&self) -> Vec<LinkFigures> {
        self.links.values().filter_map(figures).collect()
    }

    pub fn measure(&self) -> PeerMetrics {
        let mut metrics = self.metrics.clone();
        metrics.incoming_bytes = self.intake.bytes() as u64;
        for link in self.links.values() {
            add_stats(&mut metrics, link);
            metrics.connections_dialled += u64::from(link.is_open() && link.is_dialled());
            metrics.connections_accepted += u64::from(link.is_open() && !link.is_dialled());
        }
        metrics
    }
}

fn figures(link: &Link) -> Option<LinkFigures> {
    let hello = link.hello().filter(|_| link.is_dialled())?;
    let rtt = link.quic.path_stats().next().map_or(Duration::ZERO, |path| path.rtt);
    let (rtt_us, queued_bytes) = (rtt.as_micros() as u64, link.queue.bytes() as u64);
    Some(LinkFigures { node: hello.node.clone(), rtt_us, queued_bytes })
}

fn add_stats(metrics: &mut PeerMetrics, link: &Link) {
    let stats = link.quic.stats();
    metrics.packets_lost += stats.lost as u64;
    metrics.data_blocked += stats.data_blocked_sent_count;
    metrics.stream_data_blocked += stats.stream_data_blocked_sent_count;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e48_what_is_told_later_names_whoever_did_it_last_and_nobody_else() {
        let [innocent, one, other] = [1, 2, 3].map(|port| SocketAddr::from(([10, 0, 0, 1], port)));
        let (mut refusals, start) = (Refusals::default(), Instant(1_000_000_000));
        let later = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(refusals.note(innocent, 0, start), None);
        assert_eq!(refusals.note(one, 1, start), Some((1, one)), "the first at once");
        assert_eq!(refusals.note(one, 1, later(1)), None);
        assert_eq!(refusals.note(other, 2, later(2)), None);
        assert_eq!(refusals.note(innocent, 0, later(3)), None);
        assert_eq!(refusals.note(innocent, 0, later(5)), Some((3, other)));
        assert_eq!(refusals.note(innocent, 0, later(20)), None, "it is told once");
    }
}
