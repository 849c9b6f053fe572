//! The device, by theme. One program instead of one for each file: most of the time to build them
//! went into linking the same libraries.

#[path = "../common/mod.rs"]
mod common;

mod blocked;
mod capture;
mod cm;
mod connections;
mod conversation;
mod counter;
mod datagrams;
mod deaths;
mod engines;
mod faulty;
mod forged;
mod fork;
mod gpu_standin;
mod gpu_standin_announced;
mod gpu_standin_ended;
mod gpu_standin_held;
mod gpu_standin_pages;
mod gpu_standin_trouble;
mod idle;
mod ip_options;
mod lifetimes;
mod limits;
mod links_udp;
mod links_users;
mod live;
mod many;
mod multicast;
mod noise;
mod notices;
mod objects;
mod operations;
mod plain;
mod posting;
mod presence;
mod refusals;
mod report;
mod reregister;
mod sealed;
mod selective;
mod shm;
mod shm_datagrams;
mod srq;
mod steering;
mod threads;
mod vanish;
mod windows;
mod xrc;
