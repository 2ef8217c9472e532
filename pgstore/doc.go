// Package pgstore keeps rate limits in PostgreSQL, in the table of package
// migrations.
//
// Each verb comes in two forms. With Tx in its name it works in the caller's transaction, at
// any isolation level: its changes hold if and only if that commits. Without, it is a decision
// on its own, and stays even if the caller fails.
//
//	store, err := pgstore.New(pool, nil)
//	...
//	result, err := store.AllowTx(ctx, tx, SendMessage.For(userID))
//	switch {
//	case err != nil: // the call was malformed, or the database failed: not a yes
//	case !result.OK: // come back after result.RetryAfter; tx is still usable
//	}
//
// For an error in both cases there is a shorter form:
//
//	err := store.TakeTx(ctx, tx, SendMessage.For(userID))
//
// [Store.AllowFunc] and [Store.ReserveFunc] begin the transaction themselves,
// SERIALIZABLE, and run it again when PostgreSQL asks for it.
//
// # The clock
//
// It is the database's, read by the statement that decides. The clocks of the
// callers decide nothing, and a clock that goes back creates no tokens.
//
// # Isolation levels
//
// At READ COMMITTED a take that meets another waits for it, and is decided on the row that it
// left. At REPEATABLE READ and SERIALIZABLE, if the other commits, the take fails with 40001,
// as any update would; the transaction must be run again from its start. A granted take makes
// no predicate locks, so transactions on different keys do not disturb each other. A refused
// one reads the row, as Check does.
//
// # Connections
//
// All of pgx's query exec modes work. Through PgBouncer in transaction pooling choose one that
// prepares nothing: exec, cache_describe or simple_protocol. With exec and simple_protocol the
// connection's DateStyle must be ISO, as it is by default; otherwise every call fails. Under any
// number of callers, decisions on their own use up to two connections of the pool at a time. Waits
// for locked rows use up to four more, permits up to two, and Config.Escrow one that prefetches.
package pgstore
