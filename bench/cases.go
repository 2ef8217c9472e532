package main

import (
	"context"
	"fmt"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/lab"
)

// The cases, as --only and --list name them.
const (
	grantedOneKey = "granted-one-key"
	granted10k    = "granted-10k-keys"
	refusedOneKey = "refused-one-key"
	refused10k    = "refused-10k-keys"
	txOneKey      = "tx-one-key"
	tx10k         = "tx-10k-keys"
	overGrant     = "over-grant"

	grantedOneKeyFar = "granted-one-key-1ms"
	txOneKeyFar      = "tx-one-key-1ms"

	permitsOneKey = "permits-one-key"
	permits10k    = "permits-10k-keys"

	processesDecisions = "processes-decisions"
	processesTx        = "processes-tx"
)

// The implementations.
const (
	oursCombined   = "ours, combined"
	oursEscrow     = "ours, escrow"
	oursBrief      = "ours, escrow 10 ms"
	oursLong       = "ours, escrow 500 ms"
	oursHasty      = "ours, combined, synchronous_commit off"
	oursPortable   = "ours, portable"
	portableEscrow = "ours, portable, escrow"
	plainUpdate    = "single-row UPDATE"
	goRedisLua     = "Redis Lua, go-redis"
	rueidisLua     = "Redis Lua, rueidis"

	oursTx       = "ours, in the transaction"
	oursTxEscrow = "ours, before the transaction, escrow"
	oursTxLong   = "ours, before the transaction, escrow 1 s"
	oursTx32     = "ours, in the transaction, 32 shards"
	oursCaller   = "ours, AllowTx"
	oursOnCommit = "ours, with COMMIT"
	oursBatch    = "ours, in the batch of the work"

	noLimit        = "no limit"
	keyUpsert      = "no limit, but an upsert of the key's row"
	readCommitted  = "SELECT, UPDATE (race)"
	forUpdateTx    = "SELECT FOR UPDATE, in the transaction"
	serializableTx = "SERIALIZABLE, in the transaction, retried at once"

	permitsOurs         = "ours, Acquire and Release"
	permitsHasty        = "ours, Acquire and Release, synchronous_commit off"
	permitsRedis        = "Redis, sorted sets"
	permitsRedisDurable = "Redis, sorted sets, fsync"
)

// implementations says how to open each.
var implementations = map[string]opener{
	oursCombined:   openOurs(ours{}),
	oursEscrow:     openOurs(ours{escrow: escrow}),
	oursBrief:      openOurs(ours{escrow: 10 * time.Millisecond}),
	oursLong:       openOurs(ours{escrow: 500 * time.Millisecond}),
	oursHasty:      openOurs(ours{hasty: true}),
	oursPortable:   openOurs(ours{portable: true}),
	portableEscrow: openOurs(ours{portable: true, escrow: escrow}),
	plainUpdate:    openPlainUpdate,
	goRedisLua:     openGoRedisLua,
	rueidisLua:     openRueidisLua,

	oursTx:       openOursTx(1, 0),
	oursTxEscrow: openOursTx(1, escrow),
	oursTxLong:   openOursTx(1, time.Second),
	oursTx32:     openOursTx(32, 0),
	oursCaller:   openCaller(takeOurs),
	oursOnCommit: openOursOnCommit,
	oursBatch:    openOursBatch,

	noLimit:        openNoLimit,
	keyUpsert:      openCaller(upsertKey),
	readCommitted:  openNaive(naive{}),
	forUpdateTx:    openNaive(naive{lock: true}),
	serializableTx: openNaive(naive{serializable: true}),

	permitsOurs:         openPermits(ours{}),
	permitsHasty:        openPermits(ours{hasty: true}),
	permitsRedis:        openPermitsRedis(func(e *env) *redisServer { return e.redis }),
	permitsRedisDurable: openPermitsRedis(func(e *env) *redisServer { return e.durable }),
}

// needsRedis are those that do not run without it.
var needsRedis = map[string]bool{goRedisLua: true, rueidisLua: true, permitsRedis: true, permitsRedisDurable: true}

// opener makes an implementation ready for a workload.
type opener func(ctx context.Context, e *env, w workload) (contender, error)

// contender decides, for many goroutines at once.
type contender struct {
	decide func(ctx context.Context, key string) (granted bool, err error)
	close  func() // may be nil
}

// empty asks once for every key, if they are to be empty: it takes the one token, as these
// limits have a capacity of one, or has the refusal remembered.
func (c contender) empty(ctx context.Context, w workload) error {
	if !w.empty {
		return nil
	}
	err := lab.Each(busy, func(i int) (err error) {
		for k := i; k < len(w.keys) && err == nil; k += busy {
			_, err = c.decide(ctx, w.keys[k])
		}
		return err
	})
	if err != nil {
		c.close()
		return fmt.Errorf("taking what is there: %w", err)
	}
	return nil
}

// workload is the calls to make.
type workload struct {
	limit   ratelimit.TokenBucket // its Name is one per implementation and case
	permits int                   // of each key, instead of a limit
	keys    []string
	empty   bool // the keys have no tokens to begin with
}

// testCase is a workload for several implementations.
type testCase struct {
	name    string
	title   string
	keys    int
	limit   ratelimit.TokenBucket
	permits int
	empty   bool
	levels  []crowd
	impls   []string

	transactions bool          // so retries are of interest, instead of round trips
	bounded      bool          // so the grants of one long round are
	apart        bool          // in processes of their own
	late         time.Duration // are the servers' answers
}

var (
	plenty  = ratelimit.TokenBucket{Rate: 1e9, Period: time.Second, Capacity: 6e10}
	nothing = ratelimit.TokenBucket{Rate: 1, Period: 24 * time.Hour}
	ten     = ratelimit.TokenBucket{Rate: 10, Period: time.Second}
)

// escrow is for how long prefetched tokens are handed out.
const escrow = 100 * time.Millisecond

const busy = 64 // goroutines where only one number of them is of interest

// allCases returns the cases, with these numbers of goroutines where more than one
// is of interest.
func allCases(levels []int) []testCase {
	own := []string{
		oursEscrow, oursBrief, oursLong, oursCombined, oursHasty, oursPortable, portableEscrow, plainUpdate, goRedisLua, rueidisLua,
	}
	own10k := []string{oursEscrow, oursCombined, oursPortable, portableEscrow, plainUpdate, goRedisLua, rueidisLua}
	refused := []string{oursEscrow, oursCombined, oursPortable, portableEscrow, goRedisLua, rueidisLua}
	inTx := []string{noLimit, keyUpsert, oursTxEscrow, oursTx, oursCaller, oursOnCommit, oursBatch, oursTx32, forUpdateTx, serializableTx}
	exact := []string{
		oursCombined, oursEscrow, oursHasty, oursPortable, portableEscrow, oursTxEscrow, oursTx, oursCaller, oursOnCommit, oursBatch,
		forUpdateTx, serializableTx, readCommitted, goRedisLua, rueidisLua,
	}
	permits := []string{permitsOurs, permitsRedisDurable, permitsHasty, permitsRedis}
	var all []crowd
	for _, n := range levels {
		all = append(all, crowd{1, n})
	}
	one, two := []crowd{{1, busy}}, []crowd{{1, 1}, {1, busy}}
	apart := []crowd{{1, 64}, {2, 32}, {4, 16}, {8, 8}, {40, 2}}
	return []testCase{
		{name: grantedOneKey, title: "Granted, one key", keys: 1, limit: plenty, levels: all, impls: own},
		{name: granted10k, title: "Granted, 10,000 keys", keys: 10_000, limit: plenty, levels: all, impls: own10k},
		{name: refusedOneKey, title: "Refused, one key", keys: 1, empty: true, limit: nothing, levels: all, impls: refused},
		{name: refused10k, title: "Refused, 10,000 keys", keys: 10_000, empty: true, limit: nothing, levels: one, impls: refused},
		{name: txOneKey, title: "Transactions with one INSERT, one key", keys: 1, limit: plenty, levels: all, impls: inTx, transactions: true},
		{name: tx10k, title: "Transactions with one INSERT, 10,000 keys", keys: 10_000, limit: plenty, levels: one, impls: inTx, transactions: true},
		{name: permitsOneKey, title: "Permits, 100 of one key", keys: 1, permits: 100, levels: one, impls: permits},
		{name: permits10k, title: "Permits, 10 of each of 10,000 keys", keys: 10_000, permits: 10, levels: one, impls: permits},
		{name: overGrant, title: "Over-grant: burst 10, 10 a second", keys: 1, limit: ten, levels: one, impls: exact, bounded: true},
		{
			name: grantedOneKeyFar, title: "Granted, one key, 1 ms of network", keys: 1, limit: plenty, levels: two, late: time.Millisecond,
			impls: []string{oursEscrow, oursCombined, plainUpdate, goRedisLua, rueidisLua},
		},
		{
			name: txOneKeyFar, title: "Transactions with one INSERT, one key, 1 ms of network", keys: 1, limit: plenty, levels: two,
			late: time.Millisecond, transactions: true, impls: []string{noLimit, oursTxEscrow, oursTx, oursTx32, forUpdateTx},
		},
		{
			name: processesDecisions, title: "Decisions on their own, one key, in processes", keys: 1, limit: plenty, levels: apart, apart: true,
			impls: []string{plainUpdate, oursCombined, oursEscrow, goRedisLua},
		},
		{
			name: processesTx, title: "Transactions with one INSERT, one key, in processes", keys: 1, limit: plenty, levels: apart, apart: true,
			transactions: true, impls: []string{noLimit, oursTxEscrow, oursTxLong, oursTx, oursTx32},
		},
	}
}

// job is one implementation in one case with one number of goroutines.
type job struct {
	testCase
	crowd
	impl string
}

func (j job) String() string {
	callers := fmt.Sprint(j.goroutines)
	if j.apart {
		callers = j.crowd.String()
	}
	return fmt.Sprintf("%s/%s/%s", j.name, callers, j.impl)
}

// jobs returns all jobs that are wanted, in the order of the cases.
func (o options) jobs() (jobs []job) {
	for _, c := range allCases(o.levels) {
		for _, crowd := range c.levels {
			for _, impl := range c.impls {
				if j := (job{c, crowd, impl}); o.only.MatchString(j.String()) {
					jobs = append(jobs, j)
				}
			}
		}
	}
	return jobs
}

// workload returns the workload of a job's implementation. Each has a limit name of its own, so that
// none finds another's rows.
func (j job) workload() workload {
	w := workload{limit: j.limit, permits: j.permits, keys: make([]string, j.keys), empty: j.empty}
	w.limit.Name = j.name + "/" + j.impl
	for i := range w.keys {
		w.keys[i] = fmt.Sprintf("user-%05d", i)
	}
	return w
}
