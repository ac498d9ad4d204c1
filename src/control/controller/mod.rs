//! The controller: what the leader does unasked. It gives owners to partitions that have none, judges members by their
//! silence, removes rows that name nothing, and founds the cluster. The plans are pure (`plan`); here are the clock,
//! the barriers and the proposals.

mod plan;
#[cfg(test)]
mod tests;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use narad_shards::meta::NodeId;
use narad_shards::rt;
use narad_shards::rt::sync::Lock;

use super::membership::gate::{self, GateLog};
use super::{Applier, Command, Consensus, Log, Outcome, Registration, Stopped, View};
use plan::Planner;

/// Reconciles unasked that often.
const TICK: Duration = Duration::from_secs(10);
/// Looks at leadership and arrivals that often.
const WATCH: Duration = Duration::from_millis(250);
/// Ticks between two prunes.
const PRUNE_TICKS: u64 = 6;

pub struct Controller {
    log: Rc<dyn Log>,
    applier: Rc<Applier>,
    consensus: Rc<dyn Consensus>,
    /// This node, as it registers itself.
    me: Arc<Registration>,
    /// The term that this node has taken over, with what it remembers for as long as it leads.
    planner: RefCell<Planner>,
    term: Cell<Option<u64>>,
    /// One planning pass at a time (K23).
    assignment: Lock,
    gate_log: RefCell<GateLog>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Pass {
    TakeOver,
    Arrivals,
    Tick { prune: bool },
}

impl Controller {
    pub fn new(
        log: Rc<dyn Log>,
        applier: Rc<Applier>,
        consensus: Rc<dyn Consensus>,
        me: Arc<Registration>,
    ) -> Rc<Controller> {
        Rc::new(Controller {
            log,
            applier,
            consensus,
            me,
            planner: RefCell::default(),
            term: Cell::new(None),
            assignment: Lock::default(),
            gate_log: RefCell::default(),
        })
    }

    /// Whether the breaker holds verdicts back (K27); false where this node does not lead.
    pub fn breaker_open(&self) -> bool {
        self.term.get().is_some() && self.planner.borrow().breaker.is_some()
    }

    /// Runs as long as metadata can be stored; acts only while this node leads.
    pub async fn run(self: Rc<Controller>) {
        let (mut next_tick, mut ticks) = (rt::now() + TICK, 0u64);
        while self.applier.stopped().is_none() {
            let view = self.consensus.view();
            let now = rt::now();
            let pass = match (view.leads, self.term.get()) {
                (false, _) => {
                    self.term.set(None);
                    None
                }
                (true, term) if term != Some(view.term) => Some(Pass::TakeOver),
                _ => {
                    let state = self.applier.state();
                    let mut planner = self.planner.borrow_mut();
                    planner.observe(&state, now);
                    if now >= next_tick {
                        ticks += 1;
                        next_tick = now + TICK;
                        Some(Pass::Tick { prune: ticks.is_multiple_of(PRUNE_TICKS) })
                    } else {
                        planner.arrivals_are_due(&state, &view, now).then_some(Pass::Arrivals)
                    }
                }
            };
            if let Some(pass) = pass {
                // Without an outcome the next look tries again: every command is guarded.
                if let Err(stopped) = self.pass(view.term, pass).await {
                    tracing::debug!(reason = stopped.why, "controller: a pass ended early");
                }
                if pass == Pass::TakeOver {
                    (next_tick, ticks) = (rt::now() + TICK, 0);
                }
            }
            rt::sleep(WATCH).await;
        }
    }

    fn leads_in(&self, term: u64) -> bool {
        let view = self.consensus.view();
        view.leads && view.term == term
    }

    /// Plans behind a barrier, on what is applied then (K20, K23), and proposes as long as this node leads.
    async fn pass(&self, term: u64, pass: Pass) -> Result<(), Stopped> {
        let _held = self.assignment.enter().await;
        self.log.barrier().await?;
        if !self.leads_in(term) {
            return Ok(());
        }
        if pass == Pass::TakeOver {
            *self.planner.borrow_mut() = Planner::take_over(&self.applier.state(), rt::now());
            self.found(term).await?;
            self.term.set(Some(term));
        }
        let commands = {
            let (state, view, now) = (self.applier.state(), self.consensus.view(), rt::now());
            let mut planner = self.planner.borrow_mut();
            planner.observe(&state, now);
            let mut commands = Vec::new();
            if let Pass::Tick { .. } = pass {
                let was_open = planner.breaker.is_some();
                commands.extend(planner.judge(&state, &view, now));
                say_breaker(was_open, planner.breaker.as_ref());
            }
            commands.extend(planner.place(&state));
            if matches!(pass, Pass::TakeOver | Pass::Tick { prune: true }) {
                let orphans = plan::prune(&state);
                for orphan in &orphans {
                    tracing::error!(row = ?orphan, "orphan assignment row for a partition that does not exist; it is pruned");
                }
                commands.extend(orphans);
            }
            commands
        };
        let mut pruned = 0;
        for command in commands {
            if !self.leads_in(term) {
                return Ok(());
            }
            let prunes = matches!(command, Command::PruneAssignment { .. });
            match self.log.propose(command.clone()).await? {
                Outcome::Refused(refusal) => {
                    tracing::debug!(?command, ?refusal, "controller: the metadata has changed since the plan was made");
                }
                _ => pruned += usize::from(prunes),
            }
        }
        if pruned > 0 {
            tracing::info!(rows = pruned, "controller: pruned assignment rows");
        }
        Ok(())
    }

    /// The first leader registers itself, then gives the cluster its id: what it served alone becomes its own in the
    /// same entry (E36, E57).
    async fn found(&self, term: u64) -> Result<(), Stopped> {
        if self.applier.state().cluster_id() != 0 {
            return Ok(());
        }
        let me = Command::RegisterMember { registration: self.me.clone(), stamp_ms: 0 };
        for command in [me, Command::SetClusterId(rt::random_u64().max(1))] {
            if !self.leads_in(term) {
                return Ok(());
            }
            self.log.propose(command).await?;
        }
        Ok(())
    }

    /// The leader's last word on a command before it enters the log: its clock's stamp (K4), owners for new partitions,
    /// and whether every server applies the type (K18). `Err`: it is not proposed.
    pub fn prepare(&self, command: Command) -> Result<Command, String> {
        let state = self.applier.state();
        let of_founding = match &command {
            Command::RegisterMember { registration, .. } => registration.node == self.me.node,
            Command::SetClusterId(_) => true,
            _ => false,
        };
        if state.cluster_id() == 0 && !of_founding {
            return Err("the cluster is only just forming: try again".to_owned());
        }
        if let Some(holder) = gate::held_back_by(&state, &self.consensus.view(), command.type_number()) {
            self.gate_log.borrow_mut().held_back(command.type_number(), &holder, rt::now());
            return Err(format!("{holder}: upgrade it, or forget it if it is gone for good"));
        }
        self.gate_log.borrow_mut().used(&state, command.type_number(), command.type_name());
        Ok(match command {
            Command::RegisterMember { registration, .. } => {
                Command::RegisterMember { registration, stamp_ms: rt::wall_clock_ms() }
            }
            other => {
                let placed = self.planner.borrow_mut().with_owners(&state, other);
                if let Command::CreateTopic { topic, owners } = &placed {
                    if owners.contains(&NodeId::NONE) {
                        tracing::warn!(
                            topic = &*topic.name,
                            "topic created without immediate partition assignment: no member that is alive can take it, it is placed when one comes"
                        );
                    }
                }
                placed
            }
        })
    }

    /// Holds a change that brings partitions while the cluster is forming, [`plan::FORMING_WAIT`] at most and once an
    /// episode.
    pub async fn wait_formed(&self) {
        loop {
            let until = {
                let (state, view) = (self.applier.state(), self.consensus.view());
                self.planner.borrow_mut().forming_until(&state, &view, rt::now())
            };
            let Some(until) = until else { return };
            rt::sleep(WATCH.min(until - rt::now())).await;
        }
    }

    pub fn view(&self) -> View {
        self.consensus.view()
    }
}

/// Once when it opens, once when it closes.
fn say_breaker(was_open: bool, breaker: Option<&plan::Breaker>) {
    match breaker {
        Some(plan::Breaker { refused, alive_voters_after, quorum, voters }) if !was_open => {
            tracing::error!(?refused, alive_voters_after, quorum, voters, "controller: refusing to mark voters dead: a leader that still leads hears a quorum, so check that peers reach this node's peer address with the same secret");
        }
        None if was_open => tracing::info!("controller: dead-marking breaker cleared"),
        _ => {}
    }
}
