//! The public symbols, with the versions of rdma-core 65.
//!
//! Rust cannot give a symbol a version. So each symbol is a jump to the function, written in the assembler's language, with the
//! version the assembler gives it; the linker knows the versions from `nodes.map`.

use crate::{
    ah, async_event, attributes, channel, context, cq, device_list, mr, pd, port, qp, qp_modify, rates, srq,
    strings, sysfs, unsupported,
};

/// `$name@@$node` is `$function`; `$label` is a name of ours for it.
macro_rules! export {
    ($node:literal: $($name:literal = $function:path),* $(,)?) => {
        $(symbol!(concat!("nobounce_", $name), concat!($name, "@@", $node), $function);)*
    };
}

/// One versioned symbol that jumps to a function.
macro_rules! symbol {
    ($label:expr, $versioned:expr, $function:path) => {
        core::arch::global_asm!(
            ".pushsection .text.nobounce_export,\"ax\",@progbits",
            concat!(".globl ", $label),
            concat!(".type ", $label, ",@function"),
            concat!($label, ":"),
            $crate::export::jump!(),
            concat!(".size ", $label, ", .-", $label),
            concat!(".symver ", $label, ", ", $versioned),
            ".popsection",
            function = sym $function
        );
    };
}

/// The jump, in the language of this processor.
#[cfg(target_arch = "x86_64")]
macro_rules! jump {
    () => {
        "jmp {function}"
    };
}
#[cfg(target_arch = "aarch64")]
macro_rules! jump {
    () => {
        "b {function}"
    };
}

pub(crate) use {jump, symbol};

export!("IBVERBS_1.0":
    "ibv_copy_path_rec_from_kern" = unsupported::nothing,
    "ibv_copy_path_rec_to_kern" = unsupported::nothing,
    "ibv_copy_qp_attr_from_kern" = unsupported::nothing,
    "ibv_create_comp_channel" = channel::create_comp_channel,
    "ibv_destroy_comp_channel" = channel::destroy_comp_channel,
    "ibv_get_sysfs_path" = sysfs::get_sysfs_path,
    "ibv_rate_to_mult" = rates::rate_to_mult,
    "ibv_read_sysfs_file" = sysfs::read_sysfs_file,
    "mult_to_ibv_rate" = rates::mult_to_rate,
);

export!("IBVERBS_1.1":
    "ibv_ack_async_event" = async_event::ack_async_event,
    "ibv_ack_cq_events" = channel::ack_cq_events,
    "ibv_alloc_pd" = pd::alloc_pd,
    "ibv_attach_mcast" = unsupported::code,
    "ibv_close_device" = context::close_device,
    "ibv_copy_ah_attr_from_kern" = unsupported::nothing,
    "ibv_create_ah" = ah::create_ah,
    "ibv_create_ah_from_wc" = ah::create_ah_from_wc,
    "ibv_create_cq" = cq::create_cq,
    "ibv_create_qp" = qp::create_qp,
    "ibv_create_srq" = srq::create_srq,
    "ibv_dealloc_pd" = pd::dealloc_pd,
    "ibv_dereg_mr" = mr::dereg_mr,
    "ibv_destroy_ah" = ah::destroy_ah,
    "ibv_destroy_cq" = cq::destroy_cq,
    "ibv_destroy_qp" = qp::destroy_qp,
    "ibv_destroy_srq" = srq::destroy_srq,
    "ibv_detach_mcast" = unsupported::code,
    "ibv_dofork_range" = unsupported::fork_init,
    "ibv_dontfork_range" = unsupported::fork_init,
    "ibv_event_type_str" = strings::event_type_str,
    "ibv_fork_init" = unsupported::fork_init,
    "ibv_free_device_list" = device_list::free_device_list,
    "ibv_get_async_event" = async_event::get_async_event,
    "ibv_get_cq_event" = channel::get_cq_event,
    "ibv_get_device_guid" = device_list::get_device_guid,
    "ibv_get_device_list" = device_list::get_device_list,
    "ibv_get_device_name" = device_list::get_device_name,
    "ibv_init_ah_from_wc" = ah::init_ah_from_wc,
    "ibv_modify_qp" = qp_modify::modify_qp,
    "ibv_modify_srq" = srq::modify_srq,
    "ibv_node_type_str" = strings::node_type_str,
    "ibv_open_device" = context::open_device,
    "ibv_port_state_str" = strings::port_state_str,
    "ibv_query_device" = attributes::query_device,
    "ibv_query_gid" = port::query_gid,
    "ibv_query_pkey" = port::query_pkey,
    "ibv_query_port" = port::query_port,
    "ibv_query_qp" = qp_modify::query_qp,
    "ibv_query_srq" = srq::query_srq,
    "ibv_rate_to_mbps" = rates::rate_to_mbps,
    "ibv_reg_mr" = mr::reg_mr,
    "ibv_register_driver" = unsupported::nothing,
    "ibv_rereg_mr" = unsupported::code,
    "ibv_resize_cq" = cq::resize_cq,
    "ibv_resolve_eth_l2_from_gid" = ah::resolve_eth_l2_from_gid,
    "ibv_wc_status_str" = strings::wc_status_str,
    "mbps_to_ibv_rate" = rates::mbps_to_rate,
);

export!("IBVERBS_1.5": "ibv_get_pkey_index" = port::get_pkey_index);
export!("IBVERBS_1.6": "ibv_qp_to_qp_ex" = unsupported::pointer);
export!("IBVERBS_1.7": "ibv_reg_mr_iova" = mr::reg_mr_iova);
export!("IBVERBS_1.8": "ibv_reg_mr_iova2" = mr::reg_mr_iova2);
export!("IBVERBS_1.9": "ibv_get_device_index" = device_list::get_device_index);
export!("IBVERBS_1.10":
    "ibv_import_device" = unsupported::pointer,
    "ibv_import_mr" = unsupported::pointer,
    "ibv_import_pd" = unsupported::pointer,
    "ibv_query_ece" = unsupported::code,
    "ibv_set_ece" = unsupported::code,
    "ibv_unimport_mr" = unsupported::nothing,
    "ibv_unimport_pd" = unsupported::nothing,
);
export!("IBVERBS_1.11":
    "_ibv_query_gid_ex" = port::query_gid_ex,
    "_ibv_query_gid_table" = port::query_gid_table,
);
export!("IBVERBS_1.12": "ibv_reg_dmabuf_mr" = mr::reg_dmabuf_mr);
export!("IBVERBS_1.13":
    "ibv_import_dm" = unsupported::pointer,
    "ibv_is_fork_initialized" = unsupported::is_fork_initialized,
    "ibv_unimport_dm" = unsupported::nothing,
);
export!("IBVERBS_1.14": "ibv_query_qp_data_in_order" = qp_modify::query_qp_data_in_order);
export!("IBVERBS_1.15":
    "ibv_alloc_dmah" = unsupported::pointer,
    "ibv_dealloc_dmah" = unsupported::code,
    "ibv_reg_mr_ex" = unsupported::pointer,
);
export!("IBVERBS_1.16":
    "ibv_dm_export_dmabuf_fd" = unsupported::minus_one,
    "ibv_query_port_speed" = port::query_port_speed,
);
export!("IBVERBS_1.17":
    "ibv_alloc_buf" = unsupported::pointer,
    "ibv_free_buf" = unsupported::nothing,
    "ibv_reg_buf_mr" = unsupported::pointer,
);
export!("IBVERBS_1.18":
    "_ibv_query_comp_cntr_caps" = unsupported::code,
    "ibv_create_comp_cntr" = unsupported::pointer,
    "ibv_destroy_comp_cntr" = unsupported::code,
    "ibv_export_buf_dmabuf_fd" = unsupported::minus_one,
    "ibv_inc_comp_cntr" = unsupported::code,
    "ibv_inc_err_comp_cntr" = unsupported::code,
    "ibv_qp_attach_comp_cntr" = unsupported::code,
    "ibv_read_comp_cntr" = unsupported::code,
    "ibv_read_err_comp_cntr" = unsupported::code,
    "ibv_set_comp_cntr" = unsupported::code,
    "ibv_set_err_comp_cntr" = unsupported::code,
);
