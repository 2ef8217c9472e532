// Package catalog keeps definitions in the database, where they are seen and changed without a
// deployment. It is for teams that operate their limits; a program whose limits are plain values in
// code does not need it.
//
//	limits, err := catalog.New(pool, nil)
//	if err != nil {
//		return err
//	}
//	if err := limits.Publish(ctx, SendMessage, SignUp); err != nil {
//		return err
//	}
//	go limits.Run(ctx) // reads what has changed, every 5 seconds
//
//	result, err := store.Allow(ctx, limits.For(SendMessage, user))
//
// A program publishes its limits at its start. People override them, for one key or for [AllKeys],
// by [Catalog.Set] or in psql; an edit changes the fields that it names, and keeps the rest:
//
//	INSERT INTO rate_limit_definitions (name, key, rate, capacity, until, note)
//	VALUES ('send_message', 'alice', 100, 200, now() + interval '2 days', 'moving house');
//
// [Catalog.For] makes the request with the limit of a key, by a look-up in memory. It only chooses
// the definition: the store decides, as ever. With a [Config.Store] edits keep what was used.
// Without one they leave rows as they are: a larger capacity fills as time passes, a smaller one
// holds from the next call on, and a new rate counts from the row's last instant on. (Tokens that a
// process has prefetched by pgstore's Config.Escrow are handed out until their lease ends.)
//
// The table is made by the set [migrations.Catalog] of package migrations, beside that of the
// limits:
//
//	_, err := migrate.Up(ctx, pool, &migrate.Config{Set: migrations.Catalog})
//
// All methods are safe for concurrent use.
//
// [migrations.Catalog]: https://pkg.go.dev/github.com/pgratelimit/ratelimit/migrations#Catalog
package catalog
