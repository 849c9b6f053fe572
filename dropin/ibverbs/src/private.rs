//! The private symbols that rdma-core's own drivers import.
//!
//! A program linked with such a driver's library (libmlx5, libefa) must load, though no driver ever
//! gets one of our devices. So every private symbol of every private version exists and fails.
//! Programs use one, too: `ibv_query_gid_type`.

use crate::export::symbol;
use crate::{port, strings, unsupported};

/// `$name` in all private versions.
macro_rules! private {
    ($($name:literal = $function:path),* $(,)?) => {
        $(
            private!("34", "@", $name, $function);
            private!("57", "@", $name, $function);
            private!("59", "@", $name, $function);
            private!("64", "@", $name, $function);
            private!("65", "@@", $name, $function);
        )*
    };
    ($node:literal, $at:literal, $name:literal, $function:path) => {
        symbol!(concat!("nobounce_", $name, "_", $node), concat!($name, $at, "IBVERBS_PRIVATE_", $node), $function);
    };
}

/// A driver's constructor calls this to register itself; the call does nothing here.
macro_rules! register_driver {
    ($($node:literal),*) => {
        $(symbol!(
            concat!("nobounce_register_", $node),
            concat!("verbs_register_driver_", $node, "@@IBVERBS_PRIVATE_", $node),
            unsupported::nothing
        );)*
    };
}

register_driver!("34", "57", "59", "64", "65");

/// The one private symbol that is no function: a flag of one byte, which stays false.
macro_rules! flag {
    ($($node:literal, $at:literal);*) => {
        $(core::arch::global_asm!(
            ".pushsection .bss.nobounce_flag,\"aw\",@nobits",
            concat!(".globl nobounce_flag_", $node),
            concat!(".type nobounce_flag_", $node, ",@object"),
            concat!("nobounce_flag_", $node, ":"),
            ".zero 1",
            concat!(".size nobounce_flag_", $node, ", 1"),
            concat!(".symver nobounce_flag_", $node, ", verbs_allow_disassociate_destroy", $at, "IBVERBS_PRIVATE_", $node),
            ".popsection"
        );)*
    };
}

flag!("34", "@"; "57", "@"; "59", "@"; "64", "@"; "65", "@@");

private!(
    "__ioctl_final_num_attrs" = unsupported::code,
    "__verbs_log" = unsupported::nothing,
    "_verbs_init_and_alloc_context" = unsupported::pointer,
    "execute_ioctl" = unsupported::code,
    "ibv_cmd_advise_mr" = unsupported::code,
    "ibv_cmd_alloc_dm" = unsupported::code,
    "ibv_cmd_alloc_dmah" = unsupported::code,
    "ibv_cmd_alloc_mw" = unsupported::code,
    "ibv_cmd_alloc_pd" = unsupported::code,
    "ibv_cmd_attach_mcast" = unsupported::code,
    "ibv_cmd_close_xrcd" = unsupported::code,
    "ibv_cmd_create_ah" = unsupported::code,
    "ibv_cmd_create_comp_cntr" = unsupported::code,
    "ibv_cmd_create_counters" = unsupported::code,
    "ibv_cmd_create_cq" = unsupported::code,
    "ibv_cmd_create_cq_ex" = unsupported::code,
    "ibv_cmd_create_cq_ex2" = unsupported::code,
    "ibv_cmd_create_flow" = unsupported::code,
    "ibv_cmd_create_flow_action_esp" = unsupported::code,
    "ibv_cmd_create_qp" = unsupported::code,
    "ibv_cmd_create_qp_ex" = unsupported::code,
    "ibv_cmd_create_qp_ex2" = unsupported::code,
    "ibv_cmd_create_rwq_ind_table" = unsupported::code,
    "ibv_cmd_create_srq" = unsupported::code,
    "ibv_cmd_create_srq_ex" = unsupported::code,
    "ibv_cmd_create_wq" = unsupported::code,
    "ibv_cmd_dealloc_mw" = unsupported::code,
    "ibv_cmd_dealloc_pd" = unsupported::code,
    "ibv_cmd_dereg_mr" = unsupported::code,
    "ibv_cmd_destroy_ah" = unsupported::code,
    "ibv_cmd_destroy_comp_cntr" = unsupported::code,
    "ibv_cmd_destroy_counters" = unsupported::code,
    "ibv_cmd_destroy_cq" = unsupported::code,
    "ibv_cmd_destroy_flow" = unsupported::code,
    "ibv_cmd_destroy_flow_action" = unsupported::code,
    "ibv_cmd_destroy_qp" = unsupported::code,
    "ibv_cmd_destroy_rwq_ind_table" = unsupported::code,
    "ibv_cmd_destroy_srq" = unsupported::code,
    "ibv_cmd_destroy_wq" = unsupported::code,
    "ibv_cmd_detach_mcast" = unsupported::code,
    "ibv_cmd_export_dmabuf_fd" = unsupported::minus_one,
    "ibv_cmd_free_dm" = unsupported::code,
    "ibv_cmd_free_dmah" = unsupported::code,
    "ibv_cmd_get_context" = unsupported::code,
    "ibv_cmd_inc_comp_cntr" = unsupported::code,
    "ibv_cmd_inc_err_comp_cntr" = unsupported::code,
    "ibv_cmd_modify_cq" = unsupported::code,
    "ibv_cmd_modify_flow_action_esp" = unsupported::code,
    "ibv_cmd_modify_qp" = unsupported::code,
    "ibv_cmd_modify_qp_ex" = unsupported::code,
    "ibv_cmd_modify_srq" = unsupported::code,
    "ibv_cmd_modify_wq" = unsupported::code,
    "ibv_cmd_open_qp" = unsupported::code,
    "ibv_cmd_open_xrcd" = unsupported::code,
    "ibv_cmd_poll_cq" = unsupported::code,
    "ibv_cmd_post_recv" = unsupported::code,
    "ibv_cmd_post_send" = unsupported::code,
    "ibv_cmd_post_srq_recv" = unsupported::code,
    "ibv_cmd_qp_attach_comp_cntr" = unsupported::code,
    "ibv_cmd_query_comp_cntr_caps" = unsupported::code,
    "ibv_cmd_query_context" = unsupported::code,
    "ibv_cmd_query_device" = unsupported::code,
    "ibv_cmd_query_device_any" = unsupported::code,
    "ibv_cmd_query_mr" = unsupported::code,
    "ibv_cmd_query_port" = unsupported::code,
    "ibv_cmd_query_port_speed" = unsupported::code,
    "ibv_cmd_query_qp" = unsupported::code,
    "ibv_cmd_query_srq" = unsupported::code,
    "ibv_cmd_read_comp_cntr" = unsupported::code,
    "ibv_cmd_read_counters" = unsupported::code,
    "ibv_cmd_read_err_comp_cntr" = unsupported::code,
    "ibv_cmd_reg_dm_mr" = unsupported::code,
    "ibv_cmd_reg_dmabuf_mr" = unsupported::code,
    "ibv_cmd_reg_mr" = unsupported::code,
    "ibv_cmd_reg_mr_ex" = unsupported::code,
    "ibv_cmd_req_notify_cq" = unsupported::code,
    "ibv_cmd_rereg_mr" = unsupported::code,
    "ibv_cmd_resize_cq" = unsupported::code,
    "ibv_cmd_set_comp_cntr" = unsupported::code,
    "ibv_cmd_set_err_comp_cntr" = unsupported::code,
    "ibv_dmabuf_heap_alloc" = unsupported::pointer,
    "ibv_dmabuf_heap_cc_shared_init" = unsupported::pointer,
    "ibv_dmabuf_heap_destroy" = unsupported::nothing,
    "ibv_dmabuf_heap_free" = unsupported::nothing,
    "ibv_query_gid_type" = port::query_gid_type,
    "ibv_read_ibdev_sysfs_file" = unsupported::minus_one,
    "ibv_wr_opcode_str" = strings::wr_opcode_str,
    "verbs_init_cq" = unsupported::nothing,
    "verbs_open_device" = unsupported::pointer,
    "verbs_set_ops" = unsupported::nothing,
    "verbs_uninit_context" = unsupported::nothing,
);
