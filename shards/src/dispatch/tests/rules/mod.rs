//! One script for each rule of the seed's dispatch stage and each lesson of group 2.

mod failing;
mod room;
mod sending;
mod topics;
