"""MLPerf's scenarios, driven by MLCommons' own load generator (the extra "loadgen").

| scenario | queries | metric |
|---|---|---|
| SingleStream | one sample, the next when it is answered | 90th percentile of latency |
| MultiStream | several samples, the next when all are answered | 99th percentile of latency |
| Server | one sample, as a Poisson process | the highest rate whose 99th percentile holds a bound |
| Offline | all samples at once | samples a second |

https://github.com/mlcommons/inference_policies/blob/master/inference_rules.adoc
"""
