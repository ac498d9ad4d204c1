//! The one binary: broker and command line. Everything is in the library beside it.

use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    narad::cli::main(std::env::args().collect())
}
