//! Every size, offset and constant, as C has it: by the headers of this system, if it has them, and
//! by numbers that the same program printed with the headers of rdma-core 65 (`rdma-core-65.txt`;
//! `LAYOUT_HEADERS=folder LAYOUT_WRITE=file cargo test -p nobounce-verbs` makes such a file).

use std::fmt::Write as _;
use std::mem::offset_of;
use std::path::Path;
use std::process::Command;

use nobounce_verbs::*;

/// One number, how C spells it, and whether only new headers know it.
struct Fact {
    name: String,
    c: String,
    ours: u64,
    new: bool,
}

/// The macro lists the sizes of structures and the offsets of their fields, ours beside C's.
macro_rules! layout {
    ($($c:literal $ours:ident $(~ $grew:ident)? { $($field:ident $(= $cfield:literal)? $(~ $new:ident)?),* $(,)? })*) => {{
        let mut facts = Vec::new();
        $(
            facts.push(Fact {
                name: format!("{} size", $c),
                c: format!("sizeof(struct {})", $c),
                ours: size_of::<$ours>() as u64,
                new: !concat!($(stringify!($grew))?).is_empty(),
            });
            $({
                let field = [$($cfield,)? stringify!($field)][0];
                facts.push(Fact {
                    name: format!("{}.{}", $c, field),
                    c: format!("offsetof(struct {}, {})", $c, field),
                    ours: offset_of!($ours, $field) as u64,
                    new: !concat!($(stringify!($new))?).is_empty(),
                });
            })*
        )*
        facts
    }};
}

/// The macro lists how far fields lie before the end of the context.
macro_rules! before_the_end {
    ($($field:ident $(= $cfield:literal)? $(~ $new:ident)?),* $(,)?) => {
        vec![$({
            let field = [$($cfield,)? stringify!($field)][0];
            Fact {
                name: format!("verbs_context.{field} from the end"),
                c: format!("(sizeof(struct verbs_context) - offsetof(struct verbs_context, {field}))"),
                ours: (size_of::<VerbsContext>() - offset_of!(VerbsContext, $field)) as u64,
                new: !concat!($(stringify!($new))?).is_empty(),
            }
        }),*]
    };
}

/// The macro lists the values of constants, under the name that C and we share.
macro_rules! constants {
    ($($(~ $new:ident)? $name:ident),* $(,)?) => {
        vec![$(
            #[allow(clippy::cast_sign_loss, clippy::unnecessary_cast, reason = "negative numbers are compared as C prints them")]
            Fact {
                name: stringify!($name).to_owned(),
                c: stringify!($name).to_owned(),
                ours: $name as u64,
                new: !concat!($(stringify!($new))?).is_empty(),
            }
        ),*]
    };
}

/// The parts make up the whole, in the order of the stored list.
fn facts() -> Vec<Fact> {
    [
        address_facts(),
        completion_facts(),
        device_facts(),
        kernel_facts(),
        memory_facts(),
        queue_facts(),
        request_facts(),
        send_union_facts(),
        verbs_context_facts(),
        completion_constants(),
        device_constants(),
        memory_constants(),
        queue_pair_constants(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// C lays out addresses and routes.
fn address_facts() -> Vec<Fact> {
    layout! {
        "ibv_gid_entry" GidEntry { gid, gid_index, port_num, gid_type, ndev_ifindex }
        "ibv_global_route" GlobalRoute { dgid, flow_label, sgid_index, hop_limit, traffic_class }
        "ibv_grh" Grh { version_tclass_flow, paylen, next_hdr, hop_limit, sgid, dgid }
        "ibv_ah_attr" AhAttr { grh, dlid, sl, src_path_bits, static_rate, is_global, port_num }
        "ibv_ah" Ah { context, pd, handle }
        "ibv_ece" Ece { vendor_id, options, comp_mask }
    }
}

/// C lays out completion queues and their entries.
fn completion_facts() -> Vec<Fact> {
    layout! {
        "ibv_comp_channel" CompChannel { context, fd, refcnt }
        "ibv_cq" Cq {
            context, channel, cq_context, handle, cqe, mutex, cond, comp_events_completed, async_events_completed
        }
        "ibv_wc" Wc {
            wr_id, status, opcode, vendor_err, byte_len, imm_data, qp_num, src_qp, wc_flags, pkey_index, slid, sl,
            dlid_path_bits
        }
        "ibv_poll_cq_attr" PollCqAttr { comp_mask }
        "ibv_cq_ex" CqEx {
            comp_mask, status, wr_id, start_poll, next_poll, end_poll, read_opcode, read_vendor_err, read_byte_len,
            read_imm_data, read_qp_num, read_src_qp, read_wc_flags, read_slid, read_sl, read_dlid_path_bits,
            read_completion_ts, read_cvlan, read_flow_tag, read_tm_info, read_completion_wallclock_ns
        }
        "ibv_cq_init_attr_ex" CqInitAttrEx {
            cqe, cq_context, channel, comp_vector, wc_flags, comp_mask, flags, parent_domain
        }
    }
}

/// C lays out devices and their attributes.
fn device_facts() -> Vec<Fact> {
    layout! {
        "ibv_device" Device { _ops, node_type, transport_type, name, dev_name, dev_path, ibdev_path }
        "ibv_device_attr" DeviceAttr {
            fw_ver, node_guid, sys_image_guid, max_mr_size, page_size_cap, vendor_id, vendor_part_id, hw_ver, max_qp,
            max_qp_wr, device_cap_flags, max_sge, max_sge_rd, max_cq, max_cqe, max_mr, max_pd, max_qp_rd_atom,
            max_ee_rd_atom, max_res_rd_atom, max_qp_init_rd_atom, max_ee_init_rd_atom, atomic_cap, max_ee, max_rdd,
            max_mw, max_raw_ipv6_qp, max_raw_ethy_qp, max_mcast_grp, max_mcast_qp_attach,
            max_total_mcast_qp_attach, max_ah, max_fmr, max_map_per_fmr, max_srq, max_srq_wr, max_srq_sge,
            max_pkeys, local_ca_ack_delay, phys_port_cnt
        }
        "ibv_query_device_ex_input" QueryDeviceExInput { comp_mask }
        "ibv_odp_caps" OdpCaps { general_caps, per_transport_caps }
        "ibv_tso_caps" TsoCaps { max_tso, supported_qpts }
        "ibv_rss_caps" RssCaps {
            supported_qpts, max_rwq_indirection_tables, max_rwq_indirection_table_size, rx_hash_fields_mask,
            rx_hash_function
        }
        "ibv_packet_pacing_caps" PacketPacingCaps { qp_rate_limit_min, qp_rate_limit_max, supported_qpts }
        "ibv_tm_caps" TmCaps { max_rndv_hdr_size, max_num_tags, flags, max_ops, max_sge }
        "ibv_cq_moderation_caps" CqModerationCaps { max_cq_count, max_cq_period }
        "ibv_pci_atomic_caps" PciAtomicCaps { fetch_add, swap, compare_swap }
        "ibv_device_attr_ex" DeviceAttrEx {
            orig_attr, comp_mask, odp_caps, completion_timestamp_mask, hca_core_clock, device_cap_flags_ex, tso_caps,
            rss_caps, max_wq_type_rq, packet_pacing_caps, raw_packet_caps, tm_caps, cq_mod_caps, max_dm_size,
            pci_atomic_caps, xrc_odp_caps, phys_port_cnt_ex
        }
    }
}

/// C lays out structures of the kernel and path records.
fn kernel_facts() -> Vec<Fact> {
    layout! {
        "ib_uverbs_qp_attr" KernelQpAttr {
            qp_attr_mask, qp_state, cur_qp_state, path_mtu, path_mig_state, qkey, rq_psn, sq_psn, dest_qp_num,
            qp_access_flags, ah_attr, alt_ah_attr, max_send_wr, max_recv_wr, max_send_sge, max_recv_sge,
            max_inline_data, pkey_index, alt_pkey_index, en_sqd_async_notify, sq_draining, max_rd_atomic,
            max_dest_rd_atomic, min_rnr_timer, port_num, timeout, retry_cnt, rnr_retry, alt_port_num, alt_timeout
        }
        "ib_uverbs_ah_attr" KernelAhAttr {
            dgid = "grh.dgid", flow_label = "grh.flow_label", sgid_index = "grh.sgid_index",
            hop_limit = "grh.hop_limit", traffic_class = "grh.traffic_class", dlid, sl, src_path_bits, static_rate,
            is_global, port_num
        }
        "ib_user_path_rec" KernelPathRec {
            dgid, sgid, dlid, slid, raw_traffic, flow_label, reversible, mtu, pkey, hop_limit, traffic_class,
            numb_path, sl, mtu_selector, rate_selector, rate, packet_life_time_selector, packet_life_time, preference
        }
        "ibv_sa_path_rec" PathRec {
            dgid, sgid, dlid, slid, raw_traffic, flow_label, hop_limit, traffic_class, reversible, numb_path, pkey, sl,
            mtu_selector, mtu, rate_selector, rate, packet_life_time_selector, packet_life_time, preference
        }
    }
}

/// C lays out events, domains, memory and ports.
fn memory_facts() -> Vec<Fact> {
    layout! {
        "ibv_async_event" AsyncEvent { element, event_type }
        "ibv_pd" Pd { context, handle }
        "ibv_mr" Mr { context, pd, addr, length, handle, lkey, rkey }
        "ibv_mw" Mw { context, pd, rkey, handle, kind = "type" }
        "ibv_mw_bind_info" MwBindInfo { mr, addr, length, mw_access_flags }
        "ibv_mw_bind" MwBind { wr_id, send_flags, bind_info }
        "ibv_td_init_attr" TdInitAttr { comp_mask }
        "ibv_td" Td { context }
        "ibv_xrcd" Xrcd { context }
        "ibv_qp_open_attr" QpOpenAttr { comp_mask, qp_num, xrcd, qp_context, qp_type }
        "ibv_xrcd_init_attr" XrcdInitAttr { comp_mask, fd, oflags }
        "ibv_parent_domain_init_attr" ParentDomainInitAttr { pd, td, comp_mask, alloc, free, pd_context }
        "ibv_alloc_dm_attr" AllocDmAttr { length, log_align_req, comp_mask }
        "ibv_dm" Dm { context, memcpy_to_dm, memcpy_from_dm, comp_mask, handle }
        "ibv_values_ex" ValuesEx { comp_mask, raw_clock }
        "ibv_mr_init_attr" MrInitAttr ~new {
            length ~new, access ~new, comp_mask ~new, iova ~new, addr ~new, fd ~new, fd_offset ~new, dmah ~new, buf ~new
        }
        "ibv_port_attr" PortAttr ~new {
            state, max_mtu, active_mtu, gid_tbl_len, port_cap_flags, max_msg_sz, bad_pkey_cntr, qkey_viol_cntr,
            pkey_tbl_len, lid, sm_lid, lmc, max_vl_num, sm_sl, subnet_timeout, init_type_reply, active_width,
            active_speed, phys_state, link_layer, flags, port_cap_flags2, active_speed_ex ~new
        }
    }
}

/// C lays out shared receive queues and queue pairs.
fn queue_facts() -> Vec<Fact> {
    layout! {
        "ibv_srq" Srq { context, srq_context, pd, handle, mutex, cond, events_completed }
        "ibv_srq_attr" SrqAttr { max_wr, max_sge, srq_limit }
        "ibv_srq_init_attr" SrqInitAttr { srq_context, attr }
        "ibv_srq_init_attr_ex" SrqInitAttrEx { srq_context, attr, comp_mask, srq_type, pd, xrcd, cq, tm_cap }
        "ibv_qp" Qp {
            context, qp_context, pd, send_cq, recv_cq, srq, handle, qp_num, state, qp_type, mutex, cond,
            events_completed
        }
        "ibv_qp_cap" QpCap { max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data }
        "ibv_qp_init_attr" QpInitAttr { qp_context, send_cq, recv_cq, srq, cap, qp_type, sq_sig_all }
        "ibv_rx_hash_conf" RxHashConf { rx_hash_function, rx_hash_key_len, rx_hash_key, rx_hash_fields_mask }
        "ibv_qp_init_attr_ex" QpInitAttrEx {
            qp_context, send_cq, recv_cq, srq, cap, qp_type, sq_sig_all,
            comp_mask, pd, xrcd, create_flags, max_tso_header, rwq_ind_tbl, rx_hash_conf, source_qpn, send_ops_flags
        }
        "ibv_qp_attr" QpAttr {
            qp_state, cur_qp_state, path_mtu, path_mig_state, qkey, rq_psn, sq_psn, dest_qp_num, qp_access_flags, cap,
            ah_attr, alt_ah_attr, pkey_index, alt_pkey_index, en_sqd_async_notify, sq_draining, max_rd_atomic,
            max_dest_rd_atomic, min_rnr_timer, port_num, timeout, retry_cnt, rnr_retry, alt_port_num, alt_timeout,
            rate_limit
        }
    }
}

/// C lays out work requests and the context.
fn request_facts() -> Vec<Fact> {
    layout! {
        "ibv_data_buf" DataBuf { addr, length }
        "ibv_qp_ex" QpEx ~new {
            qp_base, comp_mask, wr_id, wr_flags, wr_atomic_cmp_swp, wr_atomic_fetch_add, wr_bind_mw, wr_local_inv,
            wr_rdma_read, wr_rdma_write, wr_rdma_write_imm, wr_send, wr_send_imm, wr_send_inv, wr_send_tso,
            wr_set_ud_addr, wr_set_xrc_srqn, wr_set_inline_data, wr_set_inline_data_list, wr_set_sge,
            wr_set_sge_list, wr_start, wr_complete, wr_abort, wr_atomic_write, wr_flush ~new
        }
        "ibv_sge" Sge { addr, length, lkey }
        "ibv_send_wr" SendWr {
            wr_id, next, sg_list, num_sge, opcode, send_flags, imm_data, wr, qp_type, bind_mw
        }
        "ibv_recv_wr" RecvWr { wr_id, next, sg_list, num_sge }
        "ibv_context_ops" ContextOps {
            _compat_query_device, _compat_query_port, alloc_mw, bind_mw, dealloc_mw, poll_cq, req_notify_cq,
            post_srq_recv, post_send, post_recv, _compat_async_event
        }
        "ibv_context" Context { device, ops, cmd_fd, async_fd, num_comp_vectors, mutex, abi_compat }
    }
}

/// The unions of a send request have parts of their own.
fn send_union_facts() -> Vec<Fact> {
    let wr = offset_of!(SendWr, wr);
    let parts = [
        ("wr.rdma.remote_addr", wr + offset_of!(Rdma, remote_addr)),
        ("wr.rdma.rkey", wr + offset_of!(Rdma, rkey)),
        ("wr.atomic.remote_addr", wr + offset_of!(Atomic, remote_addr)),
        ("wr.atomic.compare_add", wr + offset_of!(Atomic, compare_add)),
        ("wr.atomic.swap", wr + offset_of!(Atomic, swap)),
        ("wr.atomic.rkey", wr + offset_of!(Atomic, rkey)),
        ("wr.ud.ah", wr + offset_of!(Ud, ah)),
        ("wr.ud.remote_qpn", wr + offset_of!(Ud, remote_qpn)),
        ("wr.ud.remote_qkey", wr + offset_of!(Ud, remote_qkey)),
        ("bind_mw.rkey", offset_of!(SendWr, bind_mw) + offset_of!(BindMw, rkey)),
        ("bind_mw.bind_info", offset_of!(SendWr, bind_mw) + offset_of!(BindMw, bind_info)),
    ];
    let fact = |(field, ours): (&str, usize)| Fact {
        name: format!("ibv_send_wr.{field}"),
        c: format!("offsetof(struct ibv_send_wr, {field})"),
        ours: ours as u64,
        new: false,
    };
    parts.into_iter().map(fact).collect()
}

/// The context grows at its beginning: what counts is how far before its end something lies.
fn verbs_context_facts() -> Vec<Fact> {
    before_the_end!(
        free_buf ~new, alloc_buf ~new, dm_export_dmabuf_fd ~new, reg_mr_ex ~new, dealloc_dmah ~new, alloc_dmah ~new,
        query_port, advise_mr, alloc_null_mr, read_counters, attach_counters_point_flow, create_counters,
        destroy_counters, reg_dm_mr, alloc_dm, free_dm, modify_flow_action_esp, destroy_flow_action,
        create_flow_action_esp, modify_qp_rate_limit, alloc_parent_domain, dealloc_td, alloc_td, modify_cq,
        post_srq_ops, destroy_rwq_ind_table, create_rwq_ind_table, destroy_wq, modify_wq, create_wq,
        query_rt_values, create_cq_ex, priv_ = "priv", query_device_ex, ibv_destroy_flow, ibv_create_flow, open_qp,
        create_qp_ex, get_srq_num, create_srq_ex, open_xrcd, close_xrcd, abi_placeholder3 = "_ABI_placeholder3", sz,
        context,
    )
}

/// C numbers kinds of addresses, and the states and flags of completions.
fn completion_constants() -> Vec<Fact> {
    constants! {
        IBV_GID_TYPE_IB, IBV_GID_TYPE_ROCE_V1, IBV_GID_TYPE_ROCE_V2, IBV_WC_SUCCESS, IBV_WC_LOC_LEN_ERR,
        IBV_WC_LOC_QP_OP_ERR, IBV_WC_LOC_EEC_OP_ERR, IBV_WC_LOC_PROT_ERR, IBV_WC_WR_FLUSH_ERR,
        IBV_WC_MW_BIND_ERR, IBV_WC_BAD_RESP_ERR, IBV_WC_LOC_ACCESS_ERR, IBV_WC_REM_INV_REQ_ERR,
        IBV_WC_REM_ACCESS_ERR, IBV_WC_REM_OP_ERR, IBV_WC_RETRY_EXC_ERR, IBV_WC_RNR_RETRY_EXC_ERR,
        IBV_WC_LOC_RDD_VIOL_ERR, IBV_WC_REM_INV_RD_REQ_ERR, IBV_WC_REM_ABORT_ERR, IBV_WC_INV_EECN_ERR,
        IBV_WC_INV_EEC_STATE_ERR, IBV_WC_FATAL_ERR, IBV_WC_RESP_TIMEOUT_ERR, IBV_WC_GENERAL_ERR,
        IBV_WC_TM_ERR, IBV_WC_TM_RNDV_INCOMPLETE, IBV_WC_SEND, IBV_WC_RDMA_WRITE, IBV_WC_RDMA_READ,
        IBV_WC_COMP_SWAP, IBV_WC_FETCH_ADD, IBV_WC_RECV, IBV_WC_RECV_RDMA_WITH_IMM, IBV_WC_GRH,
        IBV_WC_WITH_IMM, IBV_WC_WITH_INV, IBV_WC_EX_WITH_BYTE_LEN, IBV_WC_EX_WITH_IMM, IBV_WC_EX_WITH_QP_NUM,
        IBV_WC_EX_WITH_SRC_QP, IBV_WC_EX_WITH_SLID, IBV_WC_EX_WITH_SL, IBV_WC_EX_WITH_DLID_PATH_BITS,
        IBV_WC_STANDARD_FLAGS, IBV_WC_EX_WITH_COMPLETION_TIMESTAMP,
        IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK, IBV_CQ_INIT_ATTR_MASK_FLAGS, IBV_CQ_INIT_ATTR_MASK_PD,
        IBV_CREATE_CQ_ATTR_SINGLE_THREADED, IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN,
    }
}

/// C numbers devices, ports and events.
fn device_constants() -> Vec<Fact> {
    constants! {
        IBV_NODE_CA, IBV_TRANSPORT_IB, IBV_DEVICE_CURR_QP_STATE_MOD, IBV_DEVICE_RC_RNR_NAK_GEN,
        IBV_DEVICE_SYS_IMAGE_GUID, IBV_DEVICE_BAD_QKEY_CNTR, IBV_ATOMIC_NONE, IBV_ATOMIC_HCA, IBV_ATOMIC_GLOB,
        IBV_MTU_256, IBV_MTU_512, IBV_MTU_1024, IBV_MTU_2048, IBV_MTU_4096, IBV_PORT_NOP, IBV_PORT_DOWN,
        IBV_PORT_INIT, IBV_PORT_ARMED, IBV_PORT_ACTIVE, IBV_PORT_ACTIVE_DEFER, IBV_LINK_LAYER_INFINIBAND,
        IBV_LINK_LAYER_ETHERNET, IBV_PORT_CM_SUP, IBV_PORT_IP_BASED_GIDS, IBV_QPF_GRH_REQUIRED,
        IBV_EVENT_CQ_ERR, IBV_EVENT_QP_FATAL, IBV_EVENT_QP_REQ_ERR, IBV_EVENT_QP_ACCESS_ERR,
        IBV_EVENT_COMM_EST, IBV_EVENT_SQ_DRAINED, IBV_EVENT_PATH_MIG, IBV_EVENT_PATH_MIG_ERR,
        IBV_EVENT_DEVICE_FATAL, IBV_EVENT_PORT_ACTIVE, IBV_EVENT_PORT_ERR, IBV_EVENT_LID_CHANGE,
        IBV_EVENT_PKEY_CHANGE, IBV_EVENT_SM_CHANGE, IBV_EVENT_SRQ_ERR, IBV_EVENT_SRQ_LIMIT_REACHED,
        IBV_EVENT_QP_LAST_WQE_REACHED, IBV_EVENT_CLIENT_REREGISTER, IBV_EVENT_GID_CHANGE, IBV_EVENT_WQ_FATAL,
    }
}

/// C numbers the flags of memory and of shared receive queues.
fn memory_constants() -> Vec<Fact> {
    constants! {
        ~new IBV_REG_MR_MASK_IOVA, ~new IBV_REG_MR_MASK_ADDR, ~new IBV_REG_MR_MASK_FD,
        ~new IBV_REG_MR_MASK_FD_OFFSET, ~new IBV_REG_MR_MASK_DMAH, ~new IBV_REG_MR_MASK_BUF,
        IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_WRITE, IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_ATOMIC,
        IBV_ACCESS_MW_BIND, IBV_ACCESS_ZERO_BASED, IBV_ACCESS_ON_DEMAND, IBV_ACCESS_HUGETLB,
        IBV_ACCESS_RELAXED_ORDERING, IBV_ACCESS_OPTIONAL_RANGE, IBV_REREG_MR_CHANGE_TRANSLATION,
        IBV_REREG_MR_CHANGE_PD, IBV_REREG_MR_CHANGE_ACCESS, IBV_REREG_MR_ERR_INPUT, IBV_REREG_MR_ERR_CMD,
        IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS, IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT,
        IBV_VALUES_MASK_RAW_CLOCK, IBV_ADVISE_MR_ADVICE_PREFETCH, IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE,
        IBV_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT, IBV_ADVISE_MR_FLAG_FLUSH, IBV_ODP_SUPPORT,
        IBV_ODP_SUPPORT_IMPLICIT, IBV_ODP_SUPPORT_SEND, IBV_ODP_SUPPORT_RECV, IBV_ODP_SUPPORT_WRITE,
        IBV_ODP_SUPPORT_READ, IBV_ODP_SUPPORT_ATOMIC, IBV_ODP_SUPPORT_SRQ_RECV,
        IBV_SRQ_MAX_WR, IBV_SRQ_LIMIT, IBV_SRQT_BASIC, IBV_SRQT_XRC, IBV_SRQ_INIT_ATTR_XRCD,
        IBV_SRQ_INIT_ATTR_CQ, IBV_XRCD_INIT_ATTR_FD, IBV_XRCD_INIT_ATTR_OFLAGS, IBV_SRQ_INIT_ATTR_TYPE, IBV_SRQ_INIT_ATTR_PD,
    }
}

/// C numbers the states and flags of queue pairs and work requests.
fn queue_pair_constants() -> Vec<Fact> {
    constants! {
        IBV_QPT_RC, IBV_QPT_UC, IBV_QPT_UD, IBV_QPT_XRC_SEND, IBV_QPT_XRC_RECV, IBV_DEVICE_XRC, IBV_QPS_RESET, IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS,
        IBV_QPS_SQD, IBV_QPS_SQE, IBV_QPS_ERR, IBV_QP_INIT_ATTR_PD, IBV_QP_INIT_ATTR_XRCD,
        IBV_QP_INIT_ATTR_CREATE_FLAGS, IBV_QP_INIT_ATTR_SEND_OPS_FLAGS, IBV_QP_STATE, IBV_QP_CUR_STATE,
        IBV_QP_EN_SQD_ASYNC_NOTIFY, IBV_QP_ACCESS_FLAGS, IBV_QP_PKEY_INDEX, IBV_QP_PORT, IBV_QP_QKEY,
        IBV_QP_AV, IBV_QP_PATH_MTU, IBV_QP_TIMEOUT, IBV_QP_RETRY_CNT, IBV_QP_RNR_RETRY, IBV_QP_RQ_PSN,
        IBV_QP_MAX_QP_RD_ATOMIC, IBV_QP_ALT_PATH, IBV_QP_MIN_RNR_TIMER, IBV_QP_SQ_PSN,
        IBV_QP_MAX_DEST_RD_ATOMIC, IBV_QP_PATH_MIG_STATE, IBV_QP_CAP, IBV_QP_DEST_QPN,
        IBV_QP_EX_WITH_RDMA_WRITE, IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM, IBV_QP_EX_WITH_SEND,
        IBV_QP_EX_WITH_SEND_WITH_IMM, IBV_QP_EX_WITH_RDMA_READ, IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP,
        IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD, IBV_QP_EX_WITH_LOCAL_INV, IBV_QP_EX_WITH_BIND_MW,
        IBV_QP_EX_WITH_SEND_WITH_INV, IBV_QP_EX_WITH_TSO, ~new IBV_QP_EX_WITH_FLUSH,
        IBV_QP_EX_WITH_ATOMIC_WRITE, ~new IBV_WR_FLUSH, IBV_WR_ATOMIC_WRITE, ~new IBV_FLUSH_GLOBAL,
        ~new IBV_FLUSH_RANGE, ~new IBV_FLUSH_MR, ~new IBV_WC_FLUSH, IBV_WC_ATOMIC_WRITE,
        ~new IBV_ACCESS_FLUSH_GLOBAL, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM,
        IBV_WR_SEND, IBV_WR_SEND_WITH_IMM, IBV_WR_RDMA_READ, IBV_WR_ATOMIC_CMP_AND_SWP,
        IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_WR_LOCAL_INV, IBV_WR_BIND_MW, IBV_WR_SEND_WITH_INV, IBV_WR_TSO,
        IBV_SEND_FENCE, IBV_SEND_SIGNALED, IBV_SEND_SOLICITED, IBV_SEND_INLINE, IBV_SEND_IP_CSUM,
    }
}

/// What the headers in `folder` (the system's own, if none) say, as lines of a name and a number.
fn ask_c(facts: &[Fact], folder: Option<&str>, new: bool) -> String {
    let mut source = String::from(
        "#include <stdio.h>\n#include <stddef.h>\n#include <infiniband/verbs.h>\n#include <infiniband/sa.h>\n#include <rdma/ib_user_verbs.h>\n#include <rdma/ib_user_sa.h>\nint main(void) {\n",
    );
    for fact in facts.iter().filter(|fact| new || !fact.new) {
        writeln!(source, "printf(\"{}: %llu\\n\", (unsigned long long)(long long){});", fact.name, fact.c)
            .unwrap();
    }
    source.push_str("return 0; }\n");
    let work = std::env::temp_dir().join(format!("nobounce-layout-{}-{new}", std::process::id()));
    std::fs::create_dir_all(&work).unwrap();
    let (file, program) = (work.join("layout.c"), work.join("layout"));
    std::fs::write(&file, source).unwrap();
    let mut cc = Command::new("cc");
    cc.arg("-w").args(folder.map(|folder| format!("-I{folder}"))).arg(&file).arg("-o").arg(&program);
    let compiled = cc.output().unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let output = Command::new(&program).output().unwrap();
    std::fs::remove_dir_all(&work).unwrap();
    String::from_utf8(output.stdout).unwrap()
}

fn compare(facts: &[Fact], theirs: &str, new: bool) {
    let expected: Vec<String> = facts
        .iter()
        .filter(|fact| new || !fact.new)
        .map(|fact| format!("{}: {}", fact.name, fact.ours))
        .collect();
    let theirs: Vec<&str> = theirs.lines().collect();
    assert_eq!(expected.len(), theirs.len(), "the lists differ in length: make the file again (see above)");
    let wrong: Vec<_> = expected.iter().zip(&theirs).filter(|(ours, theirs)| ours != *theirs).collect();
    assert!(wrong.is_empty(), "ours and C's differ: {wrong:#?}");
}

#[test]
fn as_the_headers_of_this_system() {
    if !Path::new("/usr/include/infiniband/verbs.h").exists() {
        println!("waived: no infiniband/verbs.h here (Debian: libibverbs-dev)");
        return;
    }
    let facts = facts();
    compare(&facts, &ask_c(&facts, None, false), false);
}

#[test]
fn as_the_headers_of_rdma_core_65() {
    let facts = facts();
    if let (Ok(folder), Ok(file)) = (std::env::var("LAYOUT_HEADERS"), std::env::var("LAYOUT_WRITE")) {
        std::fs::write(file, ask_c(&facts, Some(&folder), true)).unwrap();
    }
    compare(&facts, include_str!("rdma-core-65.txt"), true);
}

/// Sizes that our memory must have, whatever a program was compiled with.
#[test]
fn sizes_of_what_we_hand_out() {
    assert_eq!(size_of::<VerbsContext>(), 696);
    assert_eq!(size_of::<QpEx>(), 360);
    assert_eq!(size_of::<CqEx>(), 288);
}
