# Guarded copies to and from write-combined memory: fn(dst: rdi, src: rsi, len: rdx) -> rax = bytes not copied. See x86_64.rs.
#
# Position and length are advanced after each access. After a fault in a store the plain guarded store goes on from there: it moves
# what can be moved, meets the fault itself, and reports how far it got. Intel syntax; nothing here uses the stack. Vector
# registers above 15 need no vzeroupper.

    .pushsection .text.nobounce_memory, "ax", @progbits

    .macro nb_wc_advance count
    add rsi, \count
    add rdi, \count
    sub rdx, \count
    .endm

    .macro nb_wc_start name
    .p2align 5
    .globl nobounce_memory_wc_\name
    .hidden nobounce_memory_wc_\name
    .type nobounce_memory_wc_\name, @function
nobounce_memory_wc_\name\():
    .cfi_startproc
    .endm

    .macro nb_wc_end name
    .cfi_endproc
.Lnb_wc_\name\()_end:
    .size nobounce_memory_wc_\name, . - nobounce_memory_wc_\name
    .endm

# Stores, AVX-512: each line by one instruction, the first and the last one masked.
    nb_wc_start store_avx512
    mov ecx, edi
    and ecx, 63
    jz .Lnb_wc_store_avx512_lines
    # The first line, by its aligned address on both sides: masked bytes are not touched, not even on the private side.
    mov r9d, 64
    sub r9d, ecx
    cmp rdx, r9
    cmovb r9, rdx
    mov rax, -1
    bzhi rax, rax, r9
    shlx rax, rax, rcx
    kmovq k1, rax
    mov r10, rsi
    sub r10, rcx
    mov r11, rdi
    sub r11, rcx
    vmovdqu8 zmm16 {k1} {z}, zmmword ptr [r10]
    vmovdqu8 zmmword ptr [r11] {k1}, zmm16
    nb_wc_advance r9
.Lnb_wc_store_avx512_lines:
    cmp rdx, 256
    jb .Lnb_wc_store_avx512_line
    vmovdqu64 zmm16, zmmword ptr [rsi]
    vmovdqu64 zmm17, zmmword ptr [rsi + 64]
    vmovdqu64 zmm18, zmmword ptr [rsi + 128]
    vmovdqu64 zmm19, zmmword ptr [rsi + 192]
    vmovntdq zmmword ptr [rdi], zmm16
    vmovntdq zmmword ptr [rdi + 64], zmm17
    vmovntdq zmmword ptr [rdi + 128], zmm18
    vmovntdq zmmword ptr [rdi + 192], zmm19
    nb_wc_advance 256
    jmp .Lnb_wc_store_avx512_lines
.Lnb_wc_store_avx512_line:
    cmp rdx, 64
    jb .Lnb_wc_store_avx512_tail
    vmovdqu64 zmm16, zmmword ptr [rsi]
    vmovntdq zmmword ptr [rdi], zmm16
    nb_wc_advance 64
    jmp .Lnb_wc_store_avx512_line
.Lnb_wc_store_avx512_tail:
    test edx, edx
    jz .Lnb_wc_store_avx512_done
    mov rax, -1
    bzhi rax, rax, rdx
    kmovq k1, rax
    vmovdqu8 zmm16 {k1} {z}, zmmword ptr [rsi]
    vmovdqu8 zmmword ptr [rdi] {k1}, zmm16
.Lnb_wc_store_avx512_done:
    xor eax, eax
    ret
.Lnb_wc_store_avx512_fix:
    mov ecx, 1
    jmp nobounce_memory_store
    nb_wc_end store_avx512

# Stores by narrower vectors: pieces of the first and the last line in ascending order, whole lines by non-temporal vectors.
    .macro nb_wc_line_avx2 at
    vmovdqu ymm0, ymmword ptr [rsi + \at]
    vmovdqu ymm1, ymmword ptr [rsi + \at + 32]
    vmovntdq ymmword ptr [rdi + \at], ymm0
    vmovntdq ymmword ptr [rdi + \at + 32], ymm1
    .endm
    .macro nb_wc_line_sse2 at
    movdqu xmm0, xmmword ptr [rsi + \at]
    movdqu xmm1, xmmword ptr [rsi + \at + 16]
    movdqu xmm2, xmmword ptr [rsi + \at + 32]
    movdqu xmm3, xmmword ptr [rsi + \at + 48]
    movntdq xmmword ptr [rdi + \at], xmm0
    movntdq xmmword ptr [rdi + \at + 16], xmm1
    movntdq xmmword ptr [rdi + \at + 32], xmm2
    movntdq xmmword ptr [rdi + \at + 48], xmm3
    .endm
    .macro nb_wc_clean_avx2
    vzeroupper
    .endm
    .macro nb_wc_clean_sse2
    .endm

    .macro nb_wc_piece bits, value, unit
    test dl, \bits
    jz 1f
    mov \value, \unit ptr [rsi]
    mov \unit ptr [rdi], \value
    nb_wc_advance \bits
1:
    .endm

    .macro nb_wc_store isa
    nb_wc_start store_\isa
    test dil, 63
    jz .Lnb_wc_store_\isa\()_lines
    .irp bits, 1, 2, 4
    test dil, \bits
    jz 1f
    cmp rdx, \bits
    jb .Lnb_wc_store_\isa\()_tail
    .if \bits == 1
    mov al, byte ptr [rsi]
    mov byte ptr [rdi], al
    .elseif \bits == 2
    mov ax, word ptr [rsi]
    mov word ptr [rdi], ax
    .else
    mov eax, dword ptr [rsi]
    mov dword ptr [rdi], eax
    .endif
    nb_wc_advance \bits
1:
    .endr
.Lnb_wc_store_\isa\()_head:
    test dil, 63
    jz .Lnb_wc_store_\isa\()_lines
    cmp rdx, 8
    jb .Lnb_wc_store_\isa\()_tail
    mov rax, qword ptr [rsi]
    mov qword ptr [rdi], rax
    nb_wc_advance 8
    jmp .Lnb_wc_store_\isa\()_head
.Lnb_wc_store_\isa\()_lines:
    cmp rdx, 128
    jb .Lnb_wc_store_\isa\()_line
    nb_wc_line_\isa 0
    nb_wc_line_\isa 64
    nb_wc_advance 128
    jmp .Lnb_wc_store_\isa\()_lines
.Lnb_wc_store_\isa\()_line:
    cmp rdx, 64
    jb .Lnb_wc_store_\isa\()_clean
    nb_wc_line_\isa 0
    nb_wc_advance 64
.Lnb_wc_store_\isa\()_clean:
    nb_wc_clean_\isa
.Lnb_wc_store_\isa\()_words:
    cmp rdx, 8
    jb .Lnb_wc_store_\isa\()_tail
    mov rax, qword ptr [rsi]
    mov qword ptr [rdi], rax
    nb_wc_advance 8
    jmp .Lnb_wc_store_\isa\()_words
.Lnb_wc_store_\isa\()_tail:
    nb_wc_piece 4, eax, dword
    nb_wc_piece 2, ax, word
    nb_wc_piece 1, al, byte
    xor eax, eax
    ret
.Lnb_wc_store_\isa\()_fix:
    nb_wc_clean_\isa
    xor ecx, ecx
    jmp nobounce_memory_store
    nb_wc_end store_\isa
    .endm

    nb_wc_store avx2
    nb_wc_store sse2

# Loads of whole lines: src and len are multiples of 64.
    .macro nb_wc_get_avx512 at, a, b, c, d
    vmovntdqa zmm1\a, zmmword ptr [rsi + \at]
    .endm
    .macro nb_wc_put_avx512 at, a, b, c, d
    vmovdqu64 zmmword ptr [rdi + \at], zmm1\a
    .endm
    .macro nb_wc_get_avx2 at, a, b, c, d
    vmovntdqa ymm\a, ymmword ptr [rsi + \at]
    vmovntdqa ymm\b, ymmword ptr [rsi + \at + 32]
    .endm
    .macro nb_wc_put_avx2 at, a, b, c, d
    vmovdqu ymmword ptr [rdi + \at], ymm\a
    vmovdqu ymmword ptr [rdi + \at + 32], ymm\b
    .endm
    .macro nb_wc_get_sse41 at, a, b, c, d
    movntdqa xmm\a, xmmword ptr [rsi + \at]
    movntdqa xmm\b, xmmword ptr [rsi + \at + 16]
    movntdqa xmm\c, xmmword ptr [rsi + \at + 32]
    movntdqa xmm\d, xmmword ptr [rsi + \at + 48]
    .endm
    .macro nb_wc_put_sse41 at, a, b, c, d
    movdqu xmmword ptr [rdi + \at], xmm\a
    movdqu xmmword ptr [rdi + \at + 16], xmm\b
    movdqu xmmword ptr [rdi + \at + 32], xmm\c
    movdqu xmmword ptr [rdi + \at + 48], xmm\d
    .endm
    .macro nb_wc_get_sse2 at, a, b, c, d
    movdqa xmm\a, xmmword ptr [rsi + \at]
    movdqa xmm\b, xmmword ptr [rsi + \at + 16]
    movdqa xmm\c, xmmword ptr [rsi + \at + 32]
    movdqa xmm\d, xmmword ptr [rsi + \at + 48]
    .endm
    .macro nb_wc_put_sse2 at, a, b, c, d
    nb_wc_put_sse41 \at, \a, \b, \c, \d
    .endm
    .macro nb_wc_clean_avx512
    .endm
    .macro nb_wc_clean_sse41
    .endm

    .macro nb_wc_load isa
    nb_wc_start load_\isa
.Lnb_wc_load_\isa\()_more:
    cmp rdx, 128
    jb .Lnb_wc_load_\isa\()_line
.Lnb_wc_load_\isa\()_two:
    # Both lines are asked for before either is waited for.
    nb_wc_get_\isa 0, 6, 1, 2, 3
    nb_wc_get_\isa 64, 7, 4, 5, 8
    nb_wc_put_\isa 0, 6, 1, 2, 3
    nb_wc_put_\isa 64, 7, 4, 5, 8
.Lnb_wc_load_\isa\()_two_end:
    nb_wc_advance 128
    jmp .Lnb_wc_load_\isa\()_more
    # One line, or, after a fault among two, those that can still be had.
.Lnb_wc_load_\isa\()_line:
    cmp rdx, 64
    jb .Lnb_wc_load_\isa\()_done
    nb_wc_get_\isa 0, 6, 1, 2, 3
    nb_wc_put_\isa 0, 6, 1, 2, 3
    nb_wc_advance 64
    jmp .Lnb_wc_load_\isa\()_line
.Lnb_wc_load_\isa\()_done:
    nb_wc_clean_\isa
    mov rax, rdx
    ret
    nb_wc_end load_\isa
    .endm

    nb_wc_load avx512
    nb_wc_load avx2
    nb_wc_load sse41
    nb_wc_load sse2
    .popsection

    .pushsection .rodata.nobounce_memory, "a", @progbits
    .p2align 2
    .globl nobounce_memory_wc_fixups
    .hidden nobounce_memory_wc_fixups
    .type nobounce_memory_wc_fixups, @object
nobounce_memory_wc_fixups:
    .irp isa, avx512, avx2, sse2
    .long nobounce_memory_wc_store_\isa - nobounce_memory_wc_fixups
    .long .Lnb_wc_store_\isa\()_end - nobounce_memory_wc_fixups
    .long .Lnb_wc_store_\isa\()_fix - nobounce_memory_wc_fixups
    .endr
    .irp isa, avx512, avx2, sse41, sse2
    .long .Lnb_wc_load_\isa\()_two - nobounce_memory_wc_fixups
    .long .Lnb_wc_load_\isa\()_two_end - nobounce_memory_wc_fixups
    .long .Lnb_wc_load_\isa\()_line - nobounce_memory_wc_fixups
    .long nobounce_memory_wc_load_\isa - nobounce_memory_wc_fixups
    .long .Lnb_wc_load_\isa\()_end - nobounce_memory_wc_fixups
    .long .Lnb_wc_load_\isa\()_done - nobounce_memory_wc_fixups
    .endr
    .size nobounce_memory_wc_fixups, . - nobounce_memory_wc_fixups
    .popsection

    .irp name, advance, start, end, line_avx2, line_sse2, piece, store, load
    .purgem nb_wc_\name
    .endr
    .irp isa, avx512, avx2, sse41, sse2
    .purgem nb_wc_get_\isa
    .purgem nb_wc_put_\isa
    .purgem nb_wc_clean_\isa
    .endr
