//! Sockets on the ring.
pub struct Listener;
pub struct Stream;
impl Listener {
    pub(crate) fn bind(_ring: std::rc::Rc<super::Ring>, _a: std::net::SocketAddr) -> std::io::Result<Listener> {
        Ok(Listener)
    }
}
