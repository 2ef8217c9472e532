package table

import (
	"context"
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// collectBench is the permits of a key on a clock of its own.
type collectBench struct {
	*testing.T
	db    *pgtest.DB
	table *Table
	key   decide.Key
	now   time.Time
}

func newCollectBench(t *testing.T) *collectBench {
	db := pgtest.New(t)
	return &collectBench{t, db, New(db.Schema, false, time.Second), decide.Key{Name: "l", Key: "k"}, time.UnixMicro(1_800_000_000_000_000).UTC()}
}

// op takes a permit, or renews or releases the one that was taken.
func (b *collectBench) op(number int, fence int64, lease time.Duration, next bool) PermitDone {
	b.Helper()
	op := &PermitOp{Row: decide.Row{Key: b.key, Shard: number}, Fence: fence, Lease: lease, Next: next, New: fence == 0}
	noError(b, b.table.ChangePermits(b.Context(), b.db.Pool, []*PermitOp{op}, &b.now))
	return op.Done
}

// inTx does the same in a transaction, and returns that and its commit.
func (b *collectBench) inTx(number int, fence int64, lease time.Duration) (done PermitDone, commit func()) {
	b.Helper()
	tx, err := b.db.Pool.Begin(b.Context())
	noError(b, err)
	b.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	op := &PermitOp{Row: decide.Row{Key: b.key, Shard: number}, Fence: fence, Lease: lease}
	noError(b, b.table.ChangePermitSetIn(b.Context(), tx, PermitSet{op}, &b.now))
	return op.Done, func() { noError(b, tx.Commit(b.Context())) }
}

func (b *collectBench) take(number int) int64 {
	b.Helper()
	done := b.op(number, 0, time.Minute, false)
	if !done.OK {
		b.Fatalf("permit %d is not free", number)
	}
	return done.Fence
}

func (b *collectBench) collect(c *Collection, permits int) {
	b.Helper()
	b.now = b.now.Add(time.Millisecond)
	noError(b, b.table.CollectPermits(b.Context(), b.db.Pool, c, &b.now))
	if len(c.Permits) != permits || c.Turn == 0 {
		b.Fatalf("got %d permits and turn %d, want %d", len(c.Permits), c.Turn, permits)
	}
}

// wantHeld asserts how many permits are held, or collected.
func (b *collectBench) wantHeld(want int) {
	b.Helper()
	look := &PermitLook{Key: b.key}
	noError(b, b.table.LookAtPermitsIn(b.Context(), b.db.Pool, look, &b.now))
	held := 0
	for _, v := range look.Permits {
		if v.Until.After(look.At) {
			held++
		}
	}
	if held != want {
		b.Errorf("%d are held, want %d", held, want)
	}
}

func (b *collectBench) abandon(turn int64) {
	b.Helper()
	if left, err := b.table.AbandonPermits(b.Context(), b.db.Pool, b.key, turn); err != nil || left != 0 {
		b.Errorf("%d are left, and %v", left, err)
	}
}

// Who collects one of many permits claims one part of them, however often it looks, and gets what is
// released there.
func TestCollectOneOfMany(t *testing.T) {
	b := newCollectBench(t)
	const many = 3 * PermitPart
	noError(t, errOf(b.db.Pool.Exec(t.Context(), "INSERT INTO "+b.db.Schema+".rate_limits (name, key, shard, value, ts) SELECT 'l', 'k', n, 1, $1::timestamptz + interval '1 hour' FROM generate_series(0, $2::int4) AS n", b.now, many-1)))
	c := &Collection{Key: b.key, Limit: many, Wanted: 1, Lease: time.Minute, From: PermitPart}
	for range 3 {
		b.collect(c, 0)
	}
	var first, claimed int
	err := b.db.Pool.QueryRow(t.Context(), "SELECT min(shard), count(*) FROM "+b.db.Schema+".rate_limits WHERE shard < 10000 AND paused IS NOT NULL").Scan(&first, &claimed)
	if err != nil || first != PermitPart || claimed != PermitPart {
		t.Errorf("%d are claimed, from %d on, and %v, want one part", claimed, first, err)
	}
	if done := b.op(PermitPart+7, 1, 0, false); !done.Given {
		t.Errorf("got %+v, want it to be given", done)
	}
	b.collect(c, 1)
}

// What is released while a waiter collects is that waiter's, whichever way, and nobody else collects.
func TestCollectPermits(t *testing.T) {
	b := newCollectBench(t)
	fences := []int64{b.take(0), b.take(1), b.take(2), b.take(3)}
	c := &Collection{Key: b.key, Limit: 4, Wanted: 3, Lease: time.Minute}
	b.collect(c, 0)
	other := &Collection{Key: b.key, Limit: 4, Wanted: 2, Lease: time.Minute}
	if err := b.table.CollectPermits(t.Context(), b.db.Pool, other, &b.now); err != nil || other.Turn != 0 {
		t.Errorf("a second one has turn %d, and %v", other.Turn, err)
	}
	if done := b.op(0, fences[0], time.Minute, false); !done.OK || done.Given || done.Fence != fences[0] {
		t.Errorf("got %+v, want a claimed permit to be renewed", done)
	}
	if done := b.op(0, fences[0], 0, false); !done.OK || !done.Given {
		t.Errorf("got %+v, want what is released to be given", done)
	}
	if done := b.op(1, fences[1], time.Minute, true); !done.OK || !done.Given || done.Fence <= fences[1] {
		t.Errorf("got %+v, want what is handed on to be given, with a fence of its own", done)
	}
	if done := b.op(0, 0, time.Minute, false); done.OK {
		t.Error("what was given is taken")
	}
	b.collect(c, 0)
	done, commit := b.inTx(2, fences[2], 0)
	if commit(); !done.Given {
		t.Errorf("got %+v, want what a transaction releases to be given", done)
	}
	turn := c.Turn
	b.collect(c, 3)
	if done := b.op(3, fences[3], 0, false); !done.OK || done.Given {
		t.Errorf("got %+v, want the last one to be nobody's when all are there", done)
	}
	b.wantHeld(3)
	b.abandon(turn) // frees nothing of what it has got
	b.wantHeld(3)
	for _, v := range c.Permits {
		if done := b.op(v.Number, v.Fence, 0, false); !done.OK || done.Given {
			t.Errorf("permit %d: got %+v, want it to be released", v.Number, done)
		}
	}
	b.wantHeld(0)
	if err := b.table.CollectPermits(t.Context(), b.db.Pool, other, &b.now); err != nil || other.Turn != 0 {
		t.Errorf("one collects at once after another: turn %d, and %v", other.Turn, err)
	}
	b.now = b.now.Add(3 * time.Millisecond) // the turn is nobody's for as long as it was
	b.collect(other, 2)
}

// A permit that a transaction is about to give when all are there is freed.
func TestCollectPermitsBesideATransaction(t *testing.T) {
	b := newCollectBench(t)
	first, second := b.take(0), b.take(1)
	c := &Collection{Key: b.key, Limit: 2, Wanted: 1, Lease: time.Minute}
	b.collect(c, 0)
	turn := c.Turn
	done, commit := b.inTx(0, first, 0)
	if !done.Given {
		t.Fatalf("got %+v", done)
	}
	b.op(1, second, 0, false)
	b.collect(c, 1)
	if left, err := b.table.AbandonPermits(t.Context(), b.db.Pool, b.key, turn); err != nil || left != 1 {
		t.Errorf("%d are left, and %v, want the one that is locked", left, err)
	}
	commit()
	b.wantHeld(2)
	b.abandon(turn)
	b.wantHeld(1)
}

// A permit that was given to a waiter that has all that it wanted is not claimed by the next one, which
// would wait for a holder that there is not, and freed by nobody.
func TestCollectPermitsAfterOneThatWasGivenTooMany(t *testing.T) {
	b := newCollectBench(t)
	fences := []int64{b.take(0), b.take(1), b.take(2)}
	c := &Collection{Key: b.key, Limit: 3, Wanted: 1, Lease: time.Minute}
	b.collect(c, 0)
	turn := c.Turn
	done, commit := b.inTx(0, fences[0], 0)
	if !done.Given {
		t.Fatalf("got %+v", done)
	}
	b.op(1, fences[1], 0, false)
	b.collect(c, 1)
	commit()
	b.now = b.now.Add(3 * time.Millisecond) // the turn is nobody's for as long as it was
	next := &Collection{Key: b.key, Limit: 3, Wanted: 2, Lease: time.Minute}
	b.collect(next, 0)
	b.wantHeld(3)
	b.abandon(turn)
	b.wantHeld(2)
	b.op(2, fences[2], 0, false)
	b.collect(next, 2)
}

// A row that a transaction is making, for as long as it likes, keeps nobody from collecting others.
func TestCollectPermitsBesideOneThatIsBeingMade(t *testing.T) {
	b := newCollectBench(t)
	held := b.take(1)
	if done, _ := b.inTx(2, 0, time.Minute); !done.OK {
		t.Fatalf("got %+v", done)
	}
	c := &Collection{Key: b.key, Limit: 5, Wanted: 4, Lease: time.Minute}
	b.collect(c, 0)
	b.op(1, held, 0, false)
	b.collect(c, 4)
}

// Who gives up leaves nothing behind, and of who dies nothing is left after a lease. Nothing is left at
// once of a permit that another has taken.
func TestCollectPermitsEnds(t *testing.T) {
	b := newCollectBench(t)
	first := b.take(0)
	c := &Collection{Key: b.key, Limit: 3, Wanted: 3, Lease: time.Minute}
	b.collect(c, 0)
	b.wantHeld(3)
	b.abandon(c.Turn)
	b.wantHeld(1)
	c.Turn = 0
	b.collect(c, 0)
	b.wantHeld(3)
	died := c.Turn
	if done := b.op(0, first, 0, false); !done.Given {
		t.Errorf("got %+v, want it to be given", done)
	}
	b.now = b.now.Add(time.Minute + time.Millisecond)
	b.wantHeld(0)
	b.take(1)
	stopped := &Collection{Key: b.key, Limit: 3, Wanted: 3, Lease: time.Minute, Turn: died}
	if err := b.table.CollectPermits(t.Context(), b.db.Pool, stopped, &b.now); err != nil || stopped.Turn != 0 {
		t.Errorf("who stood still has turn %d, and %v", stopped.Turn, err)
	}
	b.abandon(died)
	b.wantHeld(1)
	c.Turn = 0
	b.collect(c, 0)
}

// A permit whose lease a waiter that collects could not renew is of who takes it.
func TestCollectPermitsWithoutOneThatIsOver(t *testing.T) {
	b := newCollectBench(t)
	b.take(0)
	c := &Collection{Key: b.key, Limit: 3, Wanted: 3, Lease: time.Minute}
	b.collect(c, 0)
	noError(t, errOf(b.db.Pool.Exec(t.Context(), "UPDATE "+b.db.Schema+".rate_limits SET ts = $1 WHERE shard IN (0, 1)", b.now)))
	b.take(1)
	b.collect(c, 0)
}

// When the limit becomes smaller, what is beyond it is let go of.
func TestCollectPermitsOfASmallerLimit(t *testing.T) {
	b := newCollectBench(t)
	last := b.take(3)
	c := &Collection{Key: b.key, Limit: 5, Wanted: 5, Lease: time.Minute}
	b.collect(c, 0)
	b.wantHeld(5)
	c.Limit, c.Wanted = 3, 3
	b.collect(c, 3)
	if done := b.op(3, last, 0, false); !done.OK || done.Given {
		t.Errorf("got %+v, want it to be nobody's", done)
	}
	b.wantHeld(3)
}
