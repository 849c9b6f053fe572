# Guarded copies: fn(dst: rdi, src: rsi, len: rdx, wide: ecx) -> rax = bytes not copied. See x86_64.rs for the shape.
#
# Position and length are advanced after each access, so that at a fault they tell how far the copy got. Only the side of the
# window is expected to fault. Intel syntax; nothing here uses the stack.

    .pushsection .text.nobounce_memory, "ax", @progbits

    .macro nb_advance count
    add rsi, \count
    add rdi, \count
    sub rdx, \count
    .endm

# \window is the low byte of the register that points into the window.
    .macro nb_copy name, window
    .p2align 5
    .globl nobounce_memory_\name
    .hidden nobounce_memory_\name
    .type nobounce_memory_\name, @function
nobounce_memory_\name\():
    .cfi_startproc
    mov r9d, ecx
    test \window, 7
    jz .Lnb_\name\()_aligned
    test \window, 1
    jz .Lnb_\name\()_head2
    test rdx, rdx
    jz .Lnb_\name\()_done
    movzx eax, byte ptr [rsi]
    mov byte ptr [rdi], al
    nb_advance 1
.Lnb_\name\()_head2:
    test \window, 2
    jz .Lnb_\name\()_head4
    cmp rdx, 2
    jb .Lnb_\name\()_tail
    movzx eax, word ptr [rsi]
    mov word ptr [rdi], ax
    nb_advance 2
.Lnb_\name\()_head4:
    test \window, 4
    jz .Lnb_\name\()_aligned
    cmp rdx, 4
    jb .Lnb_\name\()_tail
    mov eax, dword ptr [rsi]
    mov dword ptr [rdi], eax
    nb_advance 4
    # The window side is a multiple of 8 from here on, or the copy has ended.
.Lnb_\name\()_aligned:
    cmp rdx, 128
    jae .Lnb_\name\()_large
    # Fewer than 128 bytes, or what the large loops left over.
.Lnb_\name\()_words4:
    cmp rdx, 32
    jb .Lnb_\name\()_words
.Lnb_\name\()_block1:
    mov rax, qword ptr [rsi]
    mov rcx, qword ptr [rsi + 8]
    mov r8, qword ptr [rsi + 16]
    mov r10, qword ptr [rsi + 24]
    mov qword ptr [rdi], rax
    mov qword ptr [rdi + 8], rcx
    mov qword ptr [rdi + 16], r8
    mov qword ptr [rdi + 24], r10
.Lnb_\name\()_block1_end:
    nb_advance 32
    jmp .Lnb_\name\()_words4
.Lnb_\name\()_words:
    cmp rdx, 8
    jb .Lnb_\name\()_tail
    mov rax, qword ptr [rsi]
    mov qword ptr [rdi], rax
    nb_advance 8
    jmp .Lnb_\name\()_words
.Lnb_\name\()_tail:
    test dl, 4
    jz .Lnb_\name\()_tail2
    mov eax, dword ptr [rsi]
    mov dword ptr [rdi], eax
    nb_advance 4
.Lnb_\name\()_tail2:
    test dl, 2
    jz .Lnb_\name\()_tail1
    movzx eax, word ptr [rsi]
    mov word ptr [rdi], ax
    nb_advance 2
.Lnb_\name\()_tail1:
    test dl, 1
    jz .Lnb_\name\()_done
    movzx eax, byte ptr [rsi]
    mov byte ptr [rdi], al
.Lnb_\name\()_done:
    xor eax, eax
    ret

    # 128 bytes or more.
.Lnb_\name\()_large:
    cmp rdx, 4096
    jb .Lnb_\name\()_vectors
    mov eax, edi
    xor eax, esi
    test al, 7
    jnz .Lnb_\name\()_vectors
    mov rcx, rdx
    shr rcx, 3
    and edx, 7
.Lnb_\name\()_string:
    rep movsq
.Lnb_\name\()_string_end:
    jmp .Lnb_\name\()_tail

.Lnb_\name\()_vectors:
    test r9d, r9d
    jz .Lnb_\name\()_align16
.Lnb_\name\()_align32:
    test \window, 31
    jz .Lnb_\name\()_wide
    mov rax, qword ptr [rsi]
    mov qword ptr [rdi], rax
    nb_advance 8
    jmp .Lnb_\name\()_align32
.Lnb_\name\()_wide:
    cmp rdx, 128
    jb .Lnb_\name\()_wide_rest
.Lnb_\name\()_block2:
    vmovdqu ymm0, ymmword ptr [rsi]
    vmovdqu ymm1, ymmword ptr [rsi + 32]
    vmovdqu ymm2, ymmword ptr [rsi + 64]
    vmovdqu ymm3, ymmword ptr [rsi + 96]
    vmovdqu ymmword ptr [rdi], ymm0
    vmovdqu ymmword ptr [rdi + 32], ymm1
    vmovdqu ymmword ptr [rdi + 64], ymm2
    vmovdqu ymmword ptr [rdi + 96], ymm3
.Lnb_\name\()_block2_end:
    nb_advance 128
    cmp rdx, 128
    jae .Lnb_\name\()_block2
.Lnb_\name\()_wide_rest:
    vzeroupper
    jmp .Lnb_\name\()_words4

    # Without AVX: 16-byte vectors.
.Lnb_\name\()_align16:
    test \window, 8
    jz .Lnb_\name\()_narrow
    mov rax, qword ptr [rsi]
    mov qword ptr [rdi], rax
    nb_advance 8
.Lnb_\name\()_narrow:
    cmp rdx, 64
    jb .Lnb_\name\()_words4
.Lnb_\name\()_block3:
    movdqu xmm0, xmmword ptr [rsi]
    movdqu xmm1, xmmword ptr [rsi + 16]
    movdqu xmm2, xmmword ptr [rsi + 32]
    movdqu xmm3, xmmword ptr [rsi + 48]
    movdqu xmmword ptr [rdi], xmm0
    movdqu xmmword ptr [rdi + 16], xmm1
    movdqu xmmword ptr [rdi + 32], xmm2
    movdqu xmmword ptr [rdi + 48], xmm3
.Lnb_\name\()_block3_end:
    nb_advance 64
    jmp .Lnb_\name\()_narrow

    # A fault with several words in flight, none of them counted: move, one by one, those that can still be moved.
.Lnb_\name\()_fix_block:
    test r9d, r9d
    jz .Lnb_\name\()_fix_words
    vzeroupper
.Lnb_\name\()_fix_words:
    mov ecx, 16
.Lnb_\name\()_fix_next:
    cmp rdx, 8
    jb .Lnb_\name\()_fix_exact
    mov rax, qword ptr [rsi]
    mov qword ptr [rdi], rax
    nb_advance 8
    dec ecx
    jnz .Lnb_\name\()_fix_next
.Lnb_\name\()_fix_exact:
    mov rax, rdx
    ret
    # A fault in rep movsq: rcx words and rdx bytes were left.
.Lnb_\name\()_fix_string:
    lea rax, [rdx + rcx * 8]
    ret
    .cfi_endproc
.Lnb_\name\()_end:
    .size nobounce_memory_\name, . - nobounce_memory_\name
    .endm

# 8-byte accesses: one instruction on the window, then 0 in rax, or 8 after a fault.
    .macro nb_word_start name
    .p2align 4
    .globl nobounce_memory_\name
    .hidden nobounce_memory_\name
    .type nobounce_memory_\name, @function
nobounce_memory_\name\():
    .cfi_startproc
    .endm

    .macro nb_word_end name
    xor eax, eax
    ret
    .cfi_endproc
    .size nobounce_memory_\name, . - nobounce_memory_\name
    .endm

# One entry of the fix-up table, relative to the table.
    .macro nb_fixup start, end, resume
    .long \start - nobounce_memory_fixups, \end - nobounce_memory_fixups, \resume - nobounce_memory_fixups
    .endm

# The entries of one copy; the first that matches counts, so the whole routine comes last.
    .macro nb_copy_fixups name
    nb_fixup .Lnb_\name\()_block1, .Lnb_\name\()_block1_end, .Lnb_\name\()_fix_block
    nb_fixup .Lnb_\name\()_block2, .Lnb_\name\()_block2_end, .Lnb_\name\()_fix_block
    nb_fixup .Lnb_\name\()_block3, .Lnb_\name\()_block3_end, .Lnb_\name\()_fix_block
    nb_fixup .Lnb_\name\()_string, .Lnb_\name\()_string_end, .Lnb_\name\()_fix_string
    nb_fixup nobounce_memory_\name, .Lnb_\name\()_end, .Lnb_\name\()_fix_exact
    .endm

    nb_copy load, sil
    nb_copy store, dil

.Lnb_word_first:
    nb_word_start load_u64
    mov rax, qword ptr [rdi]
    mov qword ptr [rsi], rax
    nb_word_end load_u64

    nb_word_start store_u64
    mov qword ptr [rdi], rsi
    nb_word_end store_u64

    nb_word_start fetch_add
    lock xadd qword ptr [rdi], rsi
    mov qword ptr [rdx], rsi
    nb_word_end fetch_add

    nb_word_start compare_swap
    mov rax, rsi
    lock cmpxchg qword ptr [rdi], rdx
    mov qword ptr [rcx], rax
    nb_word_end compare_swap
.Lnb_word_last:

.Lnb_word_fix:
    mov eax, 8
    ret
    .popsection

    .pushsection .rodata.nobounce_memory, "a", @progbits
    .p2align 2
    .globl nobounce_memory_fixups
    .hidden nobounce_memory_fixups
    .type nobounce_memory_fixups, @object
nobounce_memory_fixups:
    nb_copy_fixups load
    nb_copy_fixups store
    nb_fixup .Lnb_word_first, .Lnb_word_last, .Lnb_word_fix
    .size nobounce_memory_fixups, . - nobounce_memory_fixups
    .popsection

    .purgem nb_advance
    .purgem nb_copy
    .purgem nb_word_start
    .purgem nb_word_end
    .purgem nb_fixup
    .purgem nb_copy_fixups
