//! Everything a broker can be made to suffer from outside: hostile clients, damaged data directories, signals, a full
//! disk, a wrong command line. Real processes, seen only through their HTTP API, exit codes and log lines.

mod support;

mod bodies;
mod command_line;
mod connections;
mod damage;
mod disk_full;
mod life;
mod operator;
mod routes;
mod slow_disk;
mod wire;
