define void @run_steps(ptr noalias %steps, ptr noalias %operands, i64 %first, i64 %last, i64 %batch) nounwind {
entry:
  ; for step in %first..%last, step 1
  br label %step
step:
    %step.index = phi i64 [%first, %entry], [%add.1, %step.body]
  %test = icmp ult i64 %step.index, %last
  br i1 %test, label %step.body, label %step.end
step.body:
    %mul = mul i64 %step.index, 64
    %at = getelementptr i8, ptr %steps, i64 %mul
    %at.1 = getelementptr i8, ptr %at, i64 16
    %rows_per_item = load i64, ptr %at.1, align 8
    %mul.1 = mul i64 %rows_per_item, %batch
    %at.2 = getelementptr i8, ptr %at, i64 24
    %rows = load i64, ptr %at.2, align 8
    %add = add i64 %mul.1, %rows
    %at.3 = getelementptr i8, ptr %at, i64 32
    %columns = load i64, ptr %at.3, align 8
    %function = load ptr, ptr %at, align 8
    %at.4 = getelementptr i8, ptr %at, i64 8
    %operands.1 = load i64, ptr %at.4, align 8
    %at.5 = getelementptr i8, ptr %operands, i64 %operands.1
    call void %function(ptr %at.5, i64 0, i64 %add, i64 0, i64 %columns)
    %add.1 = add i64 %step.index, 1
    br label %step
step.end:
  ret void
}
