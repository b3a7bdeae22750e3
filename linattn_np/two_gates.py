"""The gradients of gla with a gate on either side of the state, which the same operator computes.

    S_t = (exp g_t exp gv_t^T) * S_{t-1} + k_t v_t^T                    o_t = scale q_t^T S_t
    C_t = (exp g_{t+1} exp gv_{t+1}^T) * C_{t+1} + scale q_t do_t^T     the gradient of S_t; dht comes in behind the end

    dq_t = scale S_t do_t       dk_t = C_t v_t      dv_t = C_t^T k_t        dh0 = (exp g_1 exp gv_1^T) * C_1
    dg_t = sum_{i >= t} (q_i dq_i - k_i dk_i) + sum_v S_T dht
    dgv_t = sum_{i >= t} (o_i do_i - v_i dv_i) + sum_k S_T dht          (Yang et al., 2024, section 4.4, on both sides)

The first line turned over is the operator itself, of (do, v, k, gv, g); the second one runs backwards in time. What no
gate touches stands on both sides of these differences: a token's own q k v do, and the last one's k v dht. There the
results are taken *apart* from it, or strong gates, of which little but rounding would be left, lost their gradients.
"""


def gradients(machine, arrays, o, last, initial, do, dht):
    """([dq, dk, dv, dg, dgv], dh0), from o and S_T of the forward pass, both apart; `initial` and `dht` may be None.

    `machine` computes, on arrays [B, H, T, ...] and states [N, H, K, V]:
    forwards(q, k, v, g, gv, initial): o, o apart, S_T apart from the last token's k v;
    backwards(q, k, v, g, gv, last): o, o apart (0 at the last token), the state before the first token;
    gate_gradient(gate, (x, dx apart), (y, dy apart), S_T apart, dht): the sums above.
    """
    q, k, v, g, gv = arrays
    dq, dq_apart, _ = machine.forwards(do, v, k, gv, g, turned(initial))
    dv, dv_apart, dh0 = machine.backwards(k, q, do, g, gv, dht)
    dk, dk_apart, _ = machine.backwards(v, do, q, gv, g, turned(dht))
    dg = machine.gate_gradient(g, (q, dq_apart), (k, dk_apart), last, dht)
    dgv = machine.gate_gradient(gv, (do, o), (v, dv_apart), turned(last), turned(dht))
    return [dq, dk, dv, dg, dgv], dh0


def turned(states):
    """[N, H, K, V] <-> [N, H, V, K], a view."""
    return None if states is None else states.swapaxes(2, 3)
