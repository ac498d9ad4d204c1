//! Socket addresses as the kernel reads and writes them, and options of sockets.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::os::fd::{AsRawFd, OwnedFd};

/// The kernel's form of `address`, and its length in bytes.
pub(super) fn encode(address: SocketAddr) -> (libc::sockaddr_storage, libc::socklen_t) {
    // SAFETY: zeroed is a valid value of this plain C struct.
    let mut storage: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
    let bytes = match address {
        SocketAddr::V4(v4) => {
            let name = (&raw mut storage).cast::<libc::sockaddr_in>();
            // SAFETY: the storage is large enough and aligned for every kind of address, and lives in this frame.
            let name = unsafe { &mut *name };
            name.sin_family = libc::AF_INET as u16;
            name.sin_port = v4.port().to_be();
            name.sin_addr.s_addr = u32::from_ne_bytes(v4.ip().octets());
            std::mem::size_of_val(name)
        }
        SocketAddr::V6(v6) => {
            let name = (&raw mut storage).cast::<libc::sockaddr_in6>();
            // SAFETY: as above.
            let name = unsafe { &mut *name };
            name.sin6_family = libc::AF_INET6 as u16;
            name.sin6_port = v6.port().to_be();
            name.sin6_addr.s6_addr = v6.ip().octets();
            name.sin6_scope_id = v6.scope_id();
            std::mem::size_of_val(name)
        }
    };
    (storage, bytes as libc::socklen_t)
}

/// `None`: no internet address.
pub(super) fn decode(storage: &libc::sockaddr_storage) -> Option<SocketAddr> {
    match i32::from(storage.ss_family) {
        libc::AF_INET => {
            // SAFETY: the family says which of the two it is; the storage is aligned for it and large enough.
            let name = unsafe { &*(&raw const *storage).cast::<libc::sockaddr_in>() };
            let ip = Ipv4Addr::from(name.sin_addr.s_addr.to_ne_bytes());
            Some(SocketAddr::new(IpAddr::V4(ip), u16::from_be(name.sin_port)))
        }
        libc::AF_INET6 => {
            // SAFETY: as above.
            let name = unsafe { &*(&raw const *storage).cast::<libc::sockaddr_in6>() };
            let ip = Ipv6Addr::from(name.sin6_addr.s6_addr);
            Some(SocketAddr::V6(SocketAddrV6::new(ip, u16::from_be(name.sin6_port), 0, name.sin6_scope_id)))
        }
        _ => None,
    }
}

pub(super) fn bind_to(socket: &OwnedFd, address: SocketAddr) -> io::Result<()> {
    let (storage, bytes) = encode(address);
    // SAFETY: a live address of the stated size.
    match unsafe { libc::bind(socket.as_raw_fd(), (&raw const storage).cast(), bytes) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

pub(super) fn set_option(socket: &OwnedFd, level: i32, name: i32, value: libc::c_int) -> io::Result<()> {
    let bytes = std::mem::size_of_val(&value) as u32;
    // SAFETY: the option's value is a live int of the stated size.
    match unsafe { libc::setsockopt(socket.as_raw_fd(), level, name, (&raw const value).cast(), bytes) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

pub(super) fn option(socket: &OwnedFd, level: i32, name: i32) -> io::Result<libc::c_int> {
    let mut value: libc::c_int = 0;
    let mut bytes = std::mem::size_of_val(&value) as u32;
    // SAFETY: the option's value is a live int of the stated size.
    match unsafe { libc::getsockopt(socket.as_raw_fd(), level, name, (&raw mut value).cast(), &mut bytes) } {
        0 => Ok(value),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_comes_back_as_it_went() {
        for text in ["127.0.0.1:7943", "0.0.0.0:0", "[::1]:65535", "[fe80::1%3]:1"] {
            let address: SocketAddr = text.parse().expect("an address");
            assert_eq!(decode(&encode(address).0), Some(address));
        }
    }
}
