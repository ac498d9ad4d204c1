//! The peer book: the members as the shards see them, with what each has said of itself on its connection (E39).

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

use narad_shards::meta::{NodeId, Peer, PeerBook};
use narad_shards::remote::Hello;

use super::consensus::Known;
use super::{Member, State};

/// The address of the server of a raft id: where it was heard last, else where the configured list (id to `host:port`)
/// has it, else where its member record does, else where the consensus configuration does. What a node says of itself
/// goes before what was once written down, so that one that moves, or all of them, is found again. `find` turns a
/// `host:port` into an address, if it can.
pub fn find_server(
    raft_id: u64,
    known: Known,
    listed: &BTreeMap<String, String>,
    state: &State,
    find: impl FnMut(&str) -> Option<SocketAddr>,
) -> Option<SocketAddr> {
    let member = state.members().values().find(|member| member.registration.raft_id == raft_id);
    let node = known.node.or(member.map(|member| &**member.node()));
    let listed = node.and_then(|node| listed.get(node)).map(String::as_str);
    let told = member.map(|member| &*member.registration.peer_address);
    [known.heard, listed, told, known.recorded].into_iter().flatten().find_map(find)
}

/// Where a member's control endpoint is, and what it said there last, if anything.
pub struct Met {
    pub control_addr: SocketAddr,
    pub hello: Option<Arc<Hello>>,
}

/// The book for the shards of `me`. `met` finds each peer; one whose address is unknown is left out.
pub fn peer_book(
    version: u64,
    me: &Arc<str>,
    boot_id: u64,
    state: &State,
    mut met: impl FnMut(&Member) -> Option<Met>,
) -> PeerBook {
    let number = state.members().get(me).map_or(NodeId::NONE, |member| member.number);
    let mut peers = BTreeMap::new();
    for member in state.members().values().filter(|member| member.node() != me) {
        let Some(met) = met(member) else { continue };
        // A hello of another node under this address is no word of this one.
        let hello = met.hello.filter(|hello| *hello.node == **member.node());
        let ports = hello.iter().flat_map(|hello| &hello.shard_ports);
        let shard_addrs = ports.map(|port| SocketAddr::new(met.control_addr.ip(), *port)).collect();
        peers.insert(
            member.number,
            Peer {
                name: member.node().clone(),
                alive: member.alive,
                boot_id: hello.as_ref().map_or(0, |hello| hello.boot_id),
                control_addr: met.control_addr,
                shard_addrs,
            },
        );
    }
    PeerBook { version, me: me.clone(), boot_id, number, peers }
}
