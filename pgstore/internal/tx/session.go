package tx

import (
	"reflect"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/pgstore/internal/conn"
)

// heldShard is the shard from which a transaction took last. Only its connection keeps it, because
// a closed connection must not stay in memory.
type heldShard struct {
	by    *Taker
	tx    pgx.Tx
	key   decide.Key
	shard int
}

// heldKey is the key under which a connection keeps its heldShard.
const heldKey = "ratelimit.shard"

// hold notes that a transaction has locked a shard. A later step of the transaction takes from the
// same shard, because two transactions that each want the other's shard deadlock.
func (b *Taker) hold(tx pgx.Tx, row decide.Row) {
	if reflect.TypeOf(tx).Kind() != reflect.Pointer { // the caller's own type may not be comparable
		return
	}
	if _, data := conn.Session(tx); data != nil {
		data[heldKey] = heldShard{b, tx, row.Key, row.Shard}
	}
}

// HeldBy returns the shard of a limit that a transaction has locked; false if it knows none.
func (b *Taker) HeldBy(tx pgx.Tx, a *decide.Demand) (shard int, ok bool) {
	_, data := conn.Session(tx)
	held, ok := data[heldKey].(heldShard)
	return held.shard, ok && held.by == b && held.tx == tx && held.key == a.KeyOf() && held.shard < a.Definition.Shards
}
