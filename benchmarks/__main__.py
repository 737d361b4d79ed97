"""All benchmarks of the kernels, the plot and the tables: python -m benchmarks [--fa3 PATH] [--quick]."""

from benchmarks import bench_decode, bench_extend, bench_hyquant, bench_prefill, bench_write, plot, report

bench_decode.main()
bench_write.main()
bench_extend.main()
bench_prefill.main()
bench_hyquant.main()
plot.main()
report.main()
