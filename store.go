package ratelimit

import (
	"context"
	"time"
)

// Store is the verbs of a store on their own: a *pgstore.Store, or in tests a
// *memstore.Store. Programs can take it in place of the one or the other. A test that
// needs an answer which memory does not give embeds it, and overrides a verb; so verbs
// that are added later break nothing:
//
//	type broken struct{ ratelimit.Store }
//
//	func (broken) Allow(context.Context, ...ratelimit.Request) (ratelimit.Result, error) {
//		return ratelimit.Result{}, errors.New("the database does not answer")
//	}
//
// Package pgstore documents the verbs.
type Store interface {
	Allow(ctx context.Context, requests ...Request) (Result, error)
	AllowAtMost(ctx context.Context, r Request) (Result, error)
	AllowFirst(ctx context.Context, requests ...Request) (Result, error)
	Reserve(ctx context.Context, requests ...Request) (Result, error)
	Take(ctx context.Context, requests ...Request) error
	Wait(ctx context.Context, requests ...Request) (Result, error)

	Check(ctx context.Context, requests ...Request) (Result, error)
	CheckReserve(ctx context.Context, requests ...Request) (Result, error)

	Settle(ctx context.Context, r *Receipt, used ...float64) (Result, error)
	Cancel(ctx context.Context, r *Receipt) (cancelled bool, err error)
	Credit(ctx context.Context, r Request) (Status, error)

	Pause(ctx context.Context, limit Limit, key string, lasts time.Duration) (until time.Time, err error)
	Resume(ctx context.Context, limit Limit, key string) error
	Reset(ctx context.Context, limit Limit, key string) error
	Change(ctx context.Context, from, to Limit, key string) (Status, error)
}

// TxStore is a [Store] with the verbs in a caller's transaction as well. Tx is pgx.Tx,
// which this package does not import: both stores are a TxStore[pgx.Tx].
type TxStore[Tx any] interface {
	Store

	AllowTx(ctx context.Context, tx Tx, requests ...Request) (Result, error)
	AllowAtMostTx(ctx context.Context, tx Tx, r Request) (Result, error)
	AllowFirstTx(ctx context.Context, tx Tx, requests ...Request) (Result, error)
	ReserveTx(ctx context.Context, tx Tx, requests ...Request) (Result, error)
	TakeTx(ctx context.Context, tx Tx, requests ...Request) error

	CheckTx(ctx context.Context, tx Tx, requests ...Request) (Result, error)
	CheckReserveTx(ctx context.Context, tx Tx, requests ...Request) (Result, error)

	SettleTx(ctx context.Context, tx Tx, r *Receipt, used ...float64) (Result, error)
	CancelTx(ctx context.Context, tx Tx, r *Receipt) (cancelled bool, err error)
	CreditTx(ctx context.Context, tx Tx, r Request) (Status, error)

	PauseTx(ctx context.Context, tx Tx, limit Limit, key string, lasts time.Duration) (until time.Time, err error)
	ResumeTx(ctx context.Context, tx Tx, limit Limit, key string) error
	ResetTx(ctx context.Context, tx Tx, limit Limit, key string) error
	ChangeTx(ctx context.Context, tx Tx, from, to Limit, key string) (Status, error)

	AllowFunc(ctx context.Context, requests []Request, do func(tx Tx, result Result) error) (Result, error)
	ReserveFunc(ctx context.Context, requests []Request, do func(tx Tx, result Result) error) (Result, error)
}

// Catalog chooses the definition by which a request is decided: a *catalog.Catalog, or a
// function of the program's own behind it. Resolve returns the request with the limit that
// holds for its key, and InFlight the limit of how many at once; both have the same name as
// before. They ask nobody, and are safe for concurrent use.
type Catalog interface {
	Resolve(r Request) Request
	InFlight(limit InFlight, key string) InFlight
}

// Granted turns a refusal into an error, and is put around a call of a verb. It returns result
// and err unchanged if err is not nil or result is OK; otherwise result with its Err, which is
// [ErrRefused]. So a caller that checks only the error, as with Take, does not go on without
// tokens, and has the result and its receipt all the same:
//
//	result, err := ratelimit.Granted(store.ReserveTx(ctx, tx, Tokens.ForN(org, estimate)))
//	if err != nil {
//		return err
//	}
//	// the work may run at result.RetryAt, and is settled by result.Receipt
func Granted(result Result, err error) (Result, error) {
	if err != nil {
		return result, err
	}
	return result, result.Err()
}

// Permits is the verbs of limits of how many at once, on their own: what the method Permits of
// both stores returns.
type Permits interface {
	Acquire(ctx context.Context, request PermitRequest, rates ...Request) (Permit, error)
	AcquireWait(ctx context.Context, request PermitRequest, rates ...Request) (Permit, error)
	Renew(ctx context.Context, permit Permit) (Permit, error)
	Release(ctx context.Context, permit Permit) error
	Keep(ctx context.Context, permit Permit, do func(ctx context.Context, permit Permit) error) error
	Hold(ctx context.Context, request PermitRequest, do func(ctx context.Context, permit Permit) error) error
	Held(ctx context.Context, limit InFlight, key string) ([]Permit, error)
	Reset(ctx context.Context, limit InFlight, key string) error
}

// TxPermits is [Permits] with the verbs in a caller's transaction as well, as [TxStore] is.
type TxPermits[Tx any] interface {
	Permits

	AcquireTx(ctx context.Context, tx Tx, request PermitRequest, rates ...Request) (Permit, error)
	ReleaseTx(ctx context.Context, tx Tx, permit Permit) error
}
